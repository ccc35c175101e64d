"""From the ``model:`` of a job file to a Hugging Face folder on this machine.

Built-in names come first (write ``./tiny`` for a folder of that name), then folders, then hub ids ``owner/name``.
What Longtail makes itself goes to :func:`cache_dir`; hub models go to Hugging Face's own cache (``HF_HOME``).
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from longtail.core.errors import ModelError
from longtail.engine import smollm2

CONVERSION = "smollm2-135m-v1"
"""Cache folder of the converted model; the number goes up when the conversion changes."""

LEFTOVER_S = 3600
"""Age at which an unfinished conversion is known to be dead."""

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja", "LICENSE*", "NOTICE*"]


def resolve_model(name: str, *, base: Path | None = None) -> Path:
    """The folder of a model; relative folders count from ``base`` (default: the working directory).

    May convert the built-in SmolLM2 (seconds, once) or download from the hub. Raises :class:`ModelError`.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    folder = ((base or Path.cwd()) / os.path.expanduser(name)).absolute()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"the model {name!r} is a file, not a Hugging Face model folder")
    near = difflib.get_close_matches(name.lower(), BUILT_IN, n=1)
    if near:
        raise ModelError(f"there is no model {name!r}; did you mean {near[0]!r}?")
    if HUB_ID.fullmatch(name) and not name.startswith("."):
        return _download(name)
    raise ModelError(
        f"there is no model {name!r}: it is no built-in name ({', '.join(BUILT_IN)}), {folder} does not exist, "
        "and hub ids have the form owner/name"
    )


def cache_dir() -> Path:
    """Where converted models are kept: ``$LONGTAIL_CACHE``, else ``$XDG_CACHE_HOME/longtail``, else
    ``~/.cache/longtail``; where that cannot be written, a folder of this user among the temporary files."""
    try:
        preferred = _preferred_cache()
        preferred.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=preferred):
            return preferred
    except (OSError, RuntimeError):  # RuntimeError: this user has no home directory
        return _temporary_cache()


def _preferred_cache() -> Path:
    if os.environ.get("LONGTAIL_CACHE"):
        return Path(os.environ["LONGTAIL_CACHE"]).expanduser().absolute()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]).absolute() / "longtail"
    return Path.home() / ".cache" / "longtail"


def _temporary_cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"longtail-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ModelError(f"{folder} belongs to another user: set LONGTAIL_CACHE to a folder that can be written")
    return folder


def _tiny() -> Path:
    folder = Path(str(files("longtail"))) / "data" / "tiny"
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"the built-in model tiny is missing from this installation ({folder}): install longtail again"
        )
    return folder


def _smollm2() -> Path:
    """The converted model, made first if need be. The folder appears complete or not at all, whoever makes it."""
    with suppress(OSError, RuntimeError):
        ready = _preferred_cache() / CONVERSION  # may be a shared cache that only others can write
        if ready.is_dir():
            return ready
    gguf_path = smollm2.packaged_gguf()
    folder = cache_dir() / CONVERSION
    if folder.is_dir():
        return folder
    for old in folder.parent.glob(f".{CONVERSION}-*"):
        if time.time() - old.stat().st_mtime > LEFTOVER_S:
            shutil.rmtree(old, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{CONVERSION}-", dir=folder.parent))
    try:
        smollm2.convert(gguf_path, work / CONVERSION)
        try:
            (work / CONVERSION).rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


BUILT_IN: dict[str, Callable[[], Path]] = {"tiny": _tiny, "smollm2-135m": _smollm2}


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except GatedRepoError as error:
        raise ModelError(f"the hub model {name} is gated: accept its terms there and run 'hf auth login'") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {name}, or it is private and needs 'hf auth login'") from error
    except Exception as error:  # the hub's client raises its own, the HTTP library's and the system's kinds
        reason = textwrap.shorten(str(error), 160, placeholder=" ...")
        raise ModelError(
            f"the model {name} is neither a folder nor in the local cache, and the hub cannot be reached: {reason}"
        ) from error
