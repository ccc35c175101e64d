"""The HTTP side of `longtail up`, plain ASGI: four requests, each with the token, each with a bounded body.

    GET  /v1/jobs              all jobs, and where they run
    POST /v1/jobs              submit (``wire.Submission``)
    GET  /v1/jobs/NAME         one job
    POST /v1/jobs/NAME/stop    let it save and end

A name is a key of a table and never part of a path on the disk. What is refused says why in ``error.message``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from longtail.core.errors import CapacityError, LongtailError
from longtail.jobs.service import JobService, NoSuchJob, NotNow
from longtail.jobs.wire import BODY_LIMIT, JOBS_PATH, JobList, Submission
from longtail.serve.asgi import ClientGone, Receive, Scope, Send, header, read_body, respond
from longtail.serve.errors import ApiError

BODY_WITHIN_S = 30.0
Value = TypeVar("Value")


class JobsApp:
    """``run``, ``workers`` and ``devices`` are told to whoever lists the jobs."""

    def __init__(self, service: JobService, *, token: str, run: str, devices: list[str]) -> None:
        self._service, self._run, self._devices = service, run, devices
        self._digest = hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        with contextlib.suppress(ClientGone):
            try:
                self._authenticate(header(scope, b"authorization"))
                answer = await self._answer(scope, receive)
            except ApiError as error:
                # Whoever has no token gets this answer and no second one on its connection (see connections.py).
                ends = [(b"connection", b"close")] if error.status == 401 else []
                await respond(send, error.status, [*error.headers(), *ends], error.body())
                return
            body = answer.model_dump_json().encode()
            await respond(send, 200, [(b"content-type", b"application/json")], body)

    def _authenticate(self, authorization: bytes | None) -> None:
        scheme, _, token = (authorization or b"").partition(b" ")
        same = hmac.compare_digest(self._digest, hashlib.sha256(token.strip()).digest())
        if not same or scheme.lower() != b"bearer":
            problem = "The token is wrong." if authorization else "A token is needed: Authorization: Bearer TOKEN."
            raise ApiError(401, problem, code="invalid_token")

    async def _answer(self, scope: Scope, receive: Receive) -> BaseModel:
        path, method = scope["path"], scope["method"]
        if path == JOBS_PATH:
            _require(method, "GET", "POST")
            return await self._submit(scope, receive) if method == "POST" else self._list()
        rest = path.removeprefix(f"{JOBS_PATH}/")
        if not rest or rest == path:
            raise ApiError(404, f"There is nothing at {path[:200]!r}.", code="no_such_path")
        stops, name = rest.endswith("/stop"), rest.removesuffix("/stop")
        _require(method, "POST" if stops else "GET")
        with _told():
            return self._service.stop(name) if stops else self._service.job(name)

    def _list(self) -> JobList:
        return JobList(
            run=self._run,
            folder=str(self._service.folder),
            workers=len(self._devices),
            devices=self._devices,
            jobs=self._service.jobs(),
        )

    async def _submit(self, scope: Scope, receive: Receive) -> BaseModel:
        body = await read_body(scope, receive, limit=BODY_LIMIT, within_s=BODY_WITHIN_S)
        try:
            submission = Submission.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "body"
            raise ApiError(400, f"{where}: {first['msg']}", code="bad_request", param=where) from None
        with _told():
            return await in_a_thread(lambda: self._service.submit(submission))


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turns errors into answers; whatever is not meant to happen is printed here and not told there."""
    try:
        yield
    except NoSuchJob as error:
        raise ApiError(404, str(error), code="no_such_job") from None
    except NotNow as error:
        raise ApiError(409, str(error), code="in_use") from None
    except CapacityError as error:
        raise ApiError(409, str(error), code="does_not_fit") from None
    except LongtailError as error:
        raise ApiError(422, str(error), code="bad_job") from None
    except Exception as error:
        traceback.print_exception(error)
        text = "This is an error inside `longtail up`; its terminal shows the details."
        raise ApiError(500, text, code="internal") from None


def _require(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise ApiError(405, f"Use {' or '.join(allowed)} here.", code="wrong_method")


async def in_a_thread(work: Callable[[], Value]) -> Value:
    """The result of ``work``, done in a thread that nobody waits for when the process ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Value] = loop.create_future()

    def settle(set_it: Callable[..., None], value: object) -> None:
        if not done.done():
            set_it(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[..., None], object] = (done.set_result, work())
        except BaseException as error:
            outcome = (done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="admission", daemon=True).start()
    return await done
