"""How commands talk to `longtail up`: find it, and ask over HTTP."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from longtail.core.errors import CapacityError, ConfigError, ServerError
from longtail.jobs.presence import Presence, default_token_file, others, read_token
from longtail.jobs.wire import JOBS_PATH, Admitted, JobList, JobStatus, Submission

CONNECT_S, ANSWER_S = 5.0, 30.0
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
Answer = TypeVar("Answer", bound=BaseModel)


@dataclass(frozen=True)
class Endpoint:
    """Where a `longtail up` is, its token, and what its certificate is checked by: a file of authorities, or, with
    ``pinned``, the very certificate that it must show, whatever its names."""

    url: str
    token: str
    ca_file: Path | None = None
    pinned: bool = False


def find(to: str | None, *, token_file: Path | None = None, ca_file: Path | None = None) -> Endpoint:
    """The run that ``to`` means: an address, or the name of a run of this user on this machine; without it, the only
    one there is. Raises :class:`ConfigError`."""
    runs = others()
    if to is None and len(runs) != 1:
        if not runs:
            raise ConfigError(
                "no `longtail up` of yours runs on this machine: start one, or give its address with --to."
            )
        raise ConfigError(f"several runs are up: say which one with --to ({_names(runs)}).")
    here = [r for r in runs if to is None or to in (r.run, r.url, r.url.partition("://")[2])]
    if len(here) > 1:
        raise ConfigError(f"several runs are called {to}: say which one with --to ADDRESS ({_names(here)}).")
    if here:
        (run,) = here
        pinned = ca_file is None and run.certificate is not None
        ca_file = Path(run.certificate) if pinned and run.certificate else ca_file
        return Endpoint(run.url, read_token(token_file or Path(run.token_file)), ca_file, pinned)
    assert to is not None
    if ":" not in to:
        known = f"; there is {_names(runs)}" if runs else ""
        raise ConfigError(f"--to {to}: no run of yours on this machine has this name{known}.")
    url = _url(to)
    return Endpoint(url, read_token(token_file or default_token_file()), ca_file)


def _url(to: str) -> str:
    """Raises :class:`ConfigError`, also for an address to which the token would go in the clear."""
    try:
        parts = urlsplit(to if "://" in to else f"//{to}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme not in ("", "http", "https") or parts.path.strip("/") or parts.username:
        raise ConfigError(f"--to {to}: must be the name of a run, HOST:PORT or https://HOST:PORT.")
    scheme = parts.scheme or ("http" if host in LOOPBACK else "https")
    if scheme == "http" and host not in LOOPBACK:
        raise ConfigError(f"--to {to}: the token would cross the network in the clear; use https://{host}:{port}.")
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _names(runs: Sequence[Presence]) -> str:
    return " or ".join(f"{r.run} at {r.url.partition('://')[2]}" for r in runs)


class JobsClient:
    """A context manager. Everything raises :class:`ServerError` where nobody answers, and what is refused as the error
    that was raised there: :class:`CapacityError` for what does not fit, else :class:`ConfigError`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._url = endpoint.url
        self._http = httpx.Client(
            base_url=endpoint.url,
            headers={"authorization": f"Bearer {endpoint.token}"},
            verify=_context(endpoint) if endpoint.url.startswith("https") else False,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            trust_env=False,  # no proxy gets to see the token
        )

    def __enter__(self) -> JobsClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.close()

    def submit(self, submission: Submission) -> Admitted:
        """Waits as long as the checks take: a model may have to be downloaded."""
        body = submission.model_dump_json()
        return self._ask("POST", JOBS_PATH, Admitted, body, timeout=httpx.Timeout(None, connect=CONNECT_S))

    def list(self) -> JobList:
        return self._ask("GET", JOBS_PATH, JobList)

    def job(self, name: str) -> JobStatus:
        return self._ask("GET", f"{JOBS_PATH}/{quote(name, safe='')}", JobStatus)

    def stop(self, name: str) -> JobStatus:
        return self._ask("POST", f"{JOBS_PATH}/{quote(name, safe='')}/stop", JobStatus)

    def _ask(
        self,
        method: str,
        path: str,
        kind: type[Answer],
        body: str | None = None,
        timeout: httpx.Timeout | httpx._client.UseClientDefault = httpx.USE_CLIENT_DEFAULT,
    ) -> Answer:
        try:
            headers = {"content-type": "application/json"} if body is not None else {}
            answer = self._http.request(method, path, content=body, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise ServerError(f"`longtail up` at {self._url} does not answer: {error}.") from error
        if answer.status_code != 200:
            raise _refusal(answer, self._url)
        try:
            return kind.model_validate_json(answer.content)
        except ValidationError as error:
            raise ServerError(f"what answers at {self._url} is no `longtail up` of this version.") from error


def _refusal(answer: httpx.Response, url: str) -> Exception:
    try:
        error = answer.json()["error"]
        message, code = str(error["message"]), error["code"]
    except (ValueError, KeyError, TypeError):
        return ServerError(f"what answers at {url} is no `longtail up`: it said {answer.status_code}.")
    if code == "does_not_fit":
        return CapacityError(message)
    if code in ("bad_job", "in_use", "no_such_job", "bad_request", "body_too_large"):
        return ConfigError(message)
    return ServerError(f"`longtail up` at {url}: {message}")


def _context(endpoint: Endpoint) -> ssl.SSLContext:
    """Raises :class:`ConfigError`."""
    try:
        context = ssl.create_default_context(cafile=endpoint.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{endpoint.ca_file}: no usable certificate: {error}") from error
    if endpoint.pinned:
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
