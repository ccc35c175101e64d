"""What a run folder remembers of the jobs that were submitted to it, so that `longtail up` can go on after its end.

``config.yaml`` holds every job as it was last submitted, as after `longtail run`; ``.jobs.json`` names those that are
not over, with the KV memory that they were given. (No job can have a name that begins with a dot.)
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from longtail.core.config import Jobs
from longtail.core.errors import ConfigError
from longtail.runtime.jobfile import dump_resolved, load_resolved

CONFIG_FILE = "config.yaml"
UNFINISHED_FILE = ".jobs.json"


class Record:
    """``folder`` is a run folder that this process has locked. Raises :class:`ConfigError` if what is there cannot be
    read. One thread at a time may call :meth:`beginning`; :meth:`over` any."""

    def __init__(self, folder: Path) -> None:
        self._config, self._unfinished = folder / CONFIG_FILE, folder / UNFINISHED_FILE
        self._lock = threading.Lock()
        self.earlier: Jobs | None = load_resolved(self._config) if self._config.exists() else None
        self._kv_bytes = self._read()

    @property
    def unfinished(self) -> dict[str, int]:
        """Names of jobs that are to go on, in the order of their submission, with the KV bytes that each was given."""
        with self._lock:
            return {n: kv for n, kv in self._kv_bytes.items() if self.earlier and n in self.earlier.pipelines}

    @contextlib.contextmanager
    def beginning(self, jobs: Jobs, kv_bytes: dict[str, int]) -> Iterator[None]:
        """These pipelines start, or go on; unless the ``with`` raises, and then all is as before. Raises
        :class:`OSError`."""
        before = self.earlier
        with self._lock:
            kv_before = {n: kv for n, kv in self._kv_bytes.items() if n in kv_bytes}
        pipelines = {**(before.pipelines if before else {}), **jobs.pipelines}
        try:
            self._keep(jobs.model_copy(update={"pipelines": pipelines}), kv_bytes, instead_of=kv_bytes)
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                self._keep(before, kv_before, instead_of=kv_bytes)
            raise

    def over(self, name: str) -> None:
        """It has ended for good: it does not go on by itself. Raises :class:`OSError`."""
        with self._lock:
            if self._kv_bytes.pop(name, None) is not None:
                self._write()

    def _keep(self, jobs: Jobs | None, kv_bytes: dict[str, int], *, instead_of: Iterable[str]) -> None:
        if jobs is None:
            self._config.unlink(missing_ok=True)
        else:
            dump_resolved(jobs, self._config)  # which takes a while; ends that are told meanwhile do not wait
        with self._lock:
            self.earlier = jobs
            self._kv_bytes = {n: kv for n, kv in self._kv_bytes.items() if n not in instead_of} | kv_bytes
            self._write()

    def _read(self) -> dict[str, int]:
        try:
            found = json.loads(self._unfinished.read_text(encoding="utf-8"))
            return {str(name): int(kv) for name, kv in found["kv_bytes"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{self._unfinished} is damaged ({error}): remove it; its jobs can be submitted again."
            ) from error

    def _write(self) -> None:
        temporary = self._unfinished.with_name(f"{UNFINISHED_FILE}.{os.getpid()}")
        temporary.write_text(json.dumps({"kv_bytes": self._kv_bytes}), encoding="utf-8")
        temporary.replace(self._unfinished)
