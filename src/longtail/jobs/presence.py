"""How commands of the same user find a running `longtail up`: a small file for each, and the token beside them.

A file belongs to a run as long as the kernel holds that process's lock on it, so one that a killed run left behind is
recognised, and removed, by whoever looks next. Files and folders are for this user only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from longtail.core.errors import ConfigError

LEAST_TOKEN = 32
"""Characters; what is made here has 43, of 256 random bits."""


@dataclass(frozen=True)
class Presence:
    """A running `longtail up`. ``certificate`` is the one that it shows, if it speaks TLS."""

    run: str
    folder: str
    url: str
    pid: int
    token_file: str
    certificate: str | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


def state_folder() -> Path:
    """``$XDG_STATE_HOME/longtail``, else ``~/.local/state/longtail``, else one of this user among temporary files; made
    if absent."""
    return _private_folder("XDG_STATE_HOME", ".local/state")


def default_token_file() -> Path:
    """``$XDG_CONFIG_HOME/longtail/token``, else ``~/.config/longtail/token``, else among temporary files."""
    return _private_folder("XDG_CONFIG_HOME", ".config") / "token"


def read_token(path: Path) -> str:
    """Raises :class:`ConfigError` if there is none, or if others could read it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(fd, encoding="ascii") as file:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode):
                raise ConfigError(f"{path}: the token must be in a file.")
            if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
                raise ConfigError(
                    f"{path}: others could read this token; make the file your own, with chmod 600, or remove it."
                )
            token = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"{path}: the token cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: this is no token, which is one line of letters and digits.") from error
    if len(token) < LEAST_TOKEN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{path}: a token is one line of at least {LEAST_TOKEN} characters without spaces; remove it."
        )
    return token


def token_of(path: Path) -> str:
    """The token in ``path``, made at the first time. Raises :class:`ConfigError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd, name = tempfile.mkstemp(prefix=".token-", dir=path.parent)  # mode 600
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            with contextlib.suppress(FileExistsError):  # whoever is first has made it, and it appears whole
                os.link(name, path)
        finally:
            os.unlink(name)
    except OSError as error:
        if not path.exists():
            raise ConfigError(f"{path}: the token cannot be written: {error.strerror}.") from error
    return read_token(path)


@contextlib.contextmanager
def announced(presence: Presence) -> Iterator[None]:
    """Let others find this run until the end of the ``with``, or of the process. Raises :class:`ConfigError`."""
    folder = _up_folder()
    path = folder / f"{presence.port}.json"
    with contextlib.ExitStack() as stack:
        try:
            fd, temporary = tempfile.mkstemp(prefix=".up-", dir=folder)  # mode 600
            stack.callback(os.close, fd)
            stack.callback(_unlink_own, fd, Path(temporary))
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with os.fdopen(fd, "wb", closefd=False) as file:
                file.write(json.dumps(asdict(presence)).encode())
            os.replace(temporary, path)
            stack.callback(_unlink_own, fd, path)
        except OSError as error:
            text = f"{folder} cannot be used: {error.strerror}; set XDG_STATE_HOME to another one."
            raise ConfigError(text) from error
        yield


def _unlink_own(fd: int, path: Path) -> None:
    """Another run may have taken the name."""
    with contextlib.suppress(OSError):
        if os.fstat(fd).st_ino == path.stat().st_ino:
            path.unlink()


def others() -> list[Presence]:
    """The runs of this user on this machine that are up; what dead ones left is removed."""
    found = []
    for path in sorted(_up_folder().glob("[0-9]*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError), path.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(Presence(**json.load(file)))
                continue
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                path.unlink()
    return found


def _up_folder() -> Path:
    folder = state_folder() / "up" / socket.gethostname()  # a home may be shared by machines
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    return folder


def _private_folder(variable: str, below_home: str) -> Path:
    try:
        base = Path(os.environ[variable]) if os.environ.get(variable) else Path.home() / below_home
        folder = base.absolute() / "longtail"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: this user has no home directory
        folder = Path(tempfile.gettempdir()) / f"longtail-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise ConfigError(f"{folder} belongs to another user: set {variable} to a folder of yours.") from None
        return folder
