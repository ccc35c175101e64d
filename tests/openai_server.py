"""A small OpenAI-compatible server for tests: answers as told, in a thread, over real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """``body``: an object for JSON, or bytes as they are; None closes the connection without a word."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


def answer(tokens: int, text: str = "an answer", finish: str = "stop") -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "text": text, "finish_reason": finish}
    return Reply({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}})


def by_length(request: dict) -> Reply:
    """As many tokens as the prompt has characters."""
    return answer(len(prompt_of(request)))


def prompt_of(request: dict) -> str:
    return request["messages"][-1]["content"] if "messages" in request else request["prompt"]


class Server:
    """Use as a context manager. ``reply(request body)`` makes each answer; ``script``, if given, comes first: replies
    for the first requests in turn. ``requests`` are the bodies that came, with ``path`` and ``authorization`` added.
    """

    def __init__(
        self, reply: Callable[[dict], Reply] = by_length, *, script: list[Reply] | None = None, models=("m",)
    ) -> None:
        self.requests: list[dict] = []
        self.running = self.most_running = 0
        self._reply, self._script = reply, list(script or [])
        self._models = list(models)
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                data = [{"id": name, "object": "model"} for name in outer._models]
                self._send(Reply({"data": data}) if self.path == "/v1/models" else Reply({"detail": "Not Found"}, 404))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    extra = {"path": self.path, "authorization": self.headers.get("Authorization")}
                    outer.requests.append(body | extra)
                    outer.running += 1
                    outer.most_running = max(outer.most_running, outer.running)
                    reply = outer._script.pop(0) if outer._script else None
                try:
                    self._send(reply or outer._reply(body))
                finally:
                    with outer._lock:
                        outer.running -= 1

            def _send(self, reply: Reply) -> None:
                if reply.body is None:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Server:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._http.server_close()


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port of this machine on which nothing listens; until the end of the ``with`` nobody else can have it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]
