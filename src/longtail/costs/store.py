"""Where cost tables live: a folder with a file for each key and detail, named so that people find their way."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from longtail.core.errors import ConfigError
from longtail.costs import table_file
from longtail.costs.table import CostTable, TableKey


class Found(NamedTuple):
    """The table for a key (None: there is none), the file it is from, and a sentence for each file that is no use."""

    table: CostTable | None
    path: Path | None
    warnings: tuple[str, ...]


def file_name(key: TableKey, detail: str) -> str:
    """Such as ``llama-134.5M-5f2e90aa-float32-shm-t1-9c1b22d0.json``; coarse ones end in ``.coarse.json``.

    The last part tells machines apart.
    """
    digest = hashlib.blake2b("\n".join(map(str, key)).encode(), digest_size=4).hexdigest()
    words = re.sub(r"[^A-Za-z0-9._]+", "-", f"{key.model} {key.dtype} {key.communicator} t{key.threads}").strip("-.")
    return f"{words}-{digest}{'' if detail == 'full' else '.coarse'}.json"


def find(folder: Path, key: TableKey) -> Found:
    """The table in ``folder`` that was measured for ``key``; a full one rather than a coarse one."""
    warnings = []
    for detail in ("full", "coarse"):
        path = folder / file_name(key, detail)
        try:
            if not path.is_file():
                continue
            table = table_file.load(path)
        except ConfigError as error:
            warnings.append(f"{error} It is left out.")
            continue
        except OSError as error:  # a folder that this user may not enter
            warnings.append(f"{path}: this cost table cannot be read ({error.strerror}); left out.")
            continue
        if table.fits(key):
            return Found(table, path, tuple(warnings))
        warnings.append(f"{path}: this cost table was measured for something else ({_in_words(table.key)}); left out.")
    return Found(None, None, tuple(warnings))


def save(folder: Path, table: CostTable) -> Path:
    """Write the table into ``folder``, in place of an earlier one of its key and detail, and whole or not at all.

    Raises :class:`ConfigError` if it cannot be written.
    """
    path = folder / file_name(table.key, table.detail)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table_file.save(table, path)
    except OSError as error:
        raise ConfigError(f"{path}: the cost table cannot be written: {error.strerror or error}.") from error
    return path


def _in_words(key: TableKey) -> str:
    return f"{key.model}, {key.dtype}, {key.communicator}, {key.threads} threads, {key.machine}"
