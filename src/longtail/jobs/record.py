"""What a run folder remembers of the jobs that were submitted to it, so that `longtail up` can go on after its end.

``config.yaml`` holds every job as it was last submitted, as after `longtail run`; ``.jobs.json`` names those that are
not over, with the KV memory that they were given. (No job can have a name that begins with a dot.)
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from longtail.core.config import Jobs
from longtail.core.errors import ConfigError
from longtail.runtime.jobfile import dump_resolved, load_jobs

CONFIG_FILE = "config.yaml"
UNFINISHED_FILE = ".jobs.json"


class Record:
    """``folder`` is a run folder that this process has locked. Raises :class:`ConfigError` if what is there cannot be
    read."""

    def __init__(self, folder: Path) -> None:
        self._config, self._unfinished = folder / CONFIG_FILE, folder / UNFINISHED_FILE
        self._lock = threading.Lock()
        self.earlier: Jobs | None = load_jobs(self._config).jobs if self._config.exists() else None
        self._kv_bytes = self._read()

    @property
    def unfinished(self) -> dict[str, int]:
        """Names of jobs that are to go on, in the order of their submission, with the KV bytes that each was given."""
        with self._lock:
            return {n: kv for n, kv in self._kv_bytes.items() if self.earlier and n in self.earlier.pipelines}

    def begin(self, jobs: Jobs, kv_bytes: dict[str, int]) -> None:
        """These pipelines start, or go on. Raises :class:`OSError`."""
        with self._lock:
            pipelines = {**(self.earlier.pipelines if self.earlier else {}), **jobs.pipelines}
            merged = jobs.model_copy(update={"pipelines": pipelines})
            dump_resolved(merged, self._config)
            self.earlier = merged
            self._kv_bytes = {**{n: kv for n, kv in self._kv_bytes.items() if n not in kv_bytes}, **kv_bytes}
            self._write()

    def over(self, name: str) -> None:
        """It has ended for good: it does not go on by itself. Raises :class:`OSError`."""
        with self._lock:
            if self._kv_bytes.pop(name, None) is not None:
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
