"""What a client is told when its request fails: an HTTP status and a body of OpenAI's shape."""

from __future__ import annotations

import json
import math


class ApiError(Exception):
    """``status`` is the HTTP status, ``code`` a short machine-readable name (``queue_full``, ``bad_json``, ...),
    ``param`` the field that is wrong, ``retry_after_s`` when it is worth trying again.

    The message is one sentence for the client; it never holds a prompt, a key or a path of this machine.
    """

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after_s = (
            status,
            message,
            code,
            param,
            retry_after_s,
        )

    @property
    def type(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 403:
            return "permission_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Whole seconds for everybody, milliseconds for clients that know OpenAI's extension."""
        found = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
            found.append((b"retry-after-ms", str(max(1, math.ceil(1000 * self.retry_after_s))).encode()))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        return found

    def event(self) -> bytes:
        """The error as a server-sent event, for a stream that has begun; no ``[DONE]`` follows it."""
        return b"data: " + self.body() + b"\n\n"
