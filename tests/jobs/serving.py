"""A job service on a real port, and what may be asked of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from jobs.fake_controller import Bench
from longtail.jobs.app import JobsApp
from longtail.jobs.client import Endpoint, JobsClient
from longtail.jobs.listen import Bind, listening

TOKEN = "t" * 43
LIMITS = httpx.Limits(keepalive_expiry=600)


@dataclass
class Served:
    bench: Bench
    url: str
    http: httpx.Client

    def ask(self, method: str, path: str, *, token: str | None = TOKEN, **options: Any) -> httpx.Response:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return self.http.request(method, self.url + path, headers={**headers, **options.pop("headers", {})}, **options)

    def client(self) -> JobsClient:
        return JobsClient(Endpoint(self.url, TOKEN))


@contextlib.contextmanager
def served(bench: Bench) -> Iterator[Served]:
    app = JobsApp(bench.service, token=TOKEN, run="lab", devices=["cpu x1"])
    sock, bind = Bind.parse("127.0.0.1:0").open()
    with listening(app, sock, bind), httpx.Client(trust_env=False, timeout=60, limits=LIMITS) as http:
        yield Served(bench, bind.url, http)
