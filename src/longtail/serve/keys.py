"""API keys: who may call, with which weight and limits. Only digests of keys are stored.

    keys:
      - name: team-a
        sha256: 5f2b...            # printed by `longtail keys new team-a`; the key itself is shown once
        weight: 3                  # share of the server beside other keys that wait
        max_concurrent: 64

A key is 256 random bits, so a plain SHA-256 cannot be reversed by guessing. Every comparison takes the same time,
whether and where it matches.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longtail.core.errors import ConfigError
from longtail.serve.errors import ApiError

PREFIX = "lt-"


class ApiKey(BaseModel):
    """One entry of the keys file.

    ``weight``: share of the service beside other keys with waiting requests. ``max_concurrent``: requests in flight at
    once; more wait. ``max_waiting``: requests that may wait; more are refused with 429. ``allow_priority``: the
    client's own ``X-Vllm-Priority`` header or ``priority`` field counts. ``record_prompts``: with `--record`, prompts
    of this key are kept as text.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    max_waiting: Annotated[int, Field(ge=1)] | None = None
    allow_priority: bool = False
    record_prompts: bool = False


ANONYMOUS = ApiKey(name="anonymous", sha256="0" * 64)


class Keys:
    """The keys of a file."""

    def __init__(self, keys: list[ApiKey]) -> None:
        self._keys = [(bytes.fromhex(key.sha256), key) for key in keys]

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Raises :class:`ConfigError` naming file and entry."""
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: the keys file cannot be read: {error.strerror or error}") from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: not a YAML file: {' '.join(str(error).split())[:200]}") from error
        rows = found.get("keys") if isinstance(found, dict) and set(found) == {"keys"} else None
        if not isinstance(rows, list) or not rows:
            raise ConfigError(f"{path}: must hold a list 'keys' with at least one entry (longtail keys new NAME)")
        keys = [_key(path, number, row) for number, row in enumerate(rows, start=1)]
        for what, values in (("name", [k.name for k in keys]), ("sha256", [k.sha256 for k in keys])):
            twice = next((v for v in values if values.count(v) > 1), None)
            if twice is not None:
                raise ConfigError(f"{path}: two keys have the {what} {twice!r}: each must be unique")
        return cls(keys)

    def authenticate(self, authorization: bytes | None) -> ApiKey:
        """The key of an Authorization header. Raises :class:`ApiError` 401."""
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = None
        for known, entry in self._keys:
            if hmac.compare_digest(known, digest):
                found = entry
        if found is None or scheme.lower() != b"bearer":
            problem = "The API key is wrong." if authorization else "An API key is needed: Authorization: Bearer KEY."
            raise ApiError(401, problem, code="invalid_api_key")
        return found


def new_key() -> tuple[str, str]:
    """A fresh key and its digest for the file."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, digest: str, weight: float = 1.0) -> str:
    """The lines of a key for the list in the file. Raises :class:`ConfigError` for a name that cannot be one."""
    try:
        ApiKey(name=name, sha256=digest, weight=weight)
    except ValidationError:
        raise ConfigError(
            f"key name {name!r}: up to 64 letters, digits, dots, dashes and underscores, a letter or digit first"
        ) from None
    return f"  - name: {json.dumps(name)}\n    sha256: {digest}\n    weight: {weight:g}\n"


def _key(path: Path, number: int, row: Any) -> ApiKey:
    try:
        if isinstance(row, dict) and isinstance(row.get("weight"), int) and not isinstance(row["weight"], bool):
            row = {**row, "weight": float(row["weight"])}
        return ApiKey.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: keys[{number}]{'.' if where else ''}{where}: {first['msg']}") from None
