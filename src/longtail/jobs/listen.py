"""Where `longtail up` listens, and the server there: a thread beside the controller's loop."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn

from longtail.core.errors import ConfigError
from longtail.jobs.connections import BoundedConnection
from longtail.jobs.presence import others

DEFAULT_BIND = "127.0.0.1:8790"
BACKLOG = 128
MOST_AT_ONCE = 64
STOP_S = 5.0


@dataclass(frozen=True)
class Bind:
    """An address to listen on; with a certificate and its key, by TLS."""

    host: str
    port: int
    certificate: Path | None = None
    private_key: Path | None = None

    @classmethod
    def parse(cls, text: str, *, certificate: Path | None = None, private_key: Path | None = None) -> Bind:
        """``HOST:PORT``, ``[::1]:PORT``. Raises :class:`ConfigError` for what is none, for half a certificate or one
        that cannot be used, and for an address that others can reach without TLS."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"--bind {text}: must be HOST:PORT, such as {DEFAULT_BIND}.")
        from longtail.serve.http import Listen

        bind = cls(host, int(port), certificate, private_key)
        Listen(certificate=certificate, private_key=private_key).check(keys=True, open_to_all=True)
        if not bind.is_loopback and certificate is None:
            raise ConfigError(
                f"--bind {text} can be reached from other machines, and without TLS anybody on the way could read the"
                " token and submit jobs: give --tls-cert and --tls-key, or listen on 127.0.0.1."
            )
        return bind

    @property
    def is_loopback(self) -> bool:
        """Only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def url(self) -> str:
        """For clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self.certificate else 'http'}://{shown}:{self.port}"

    def open(self) -> tuple[socket.socket, Bind]:
        """A listening socket, and the address with the port that it got (port 0 takes a free one).

        Raises :class:`ConfigError` that names the run which has the address, where it is one of ours.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"--bind {self.host}:{self.port}: {error.strerror or error}.") from error
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise ConfigError(self._why_not(error)) from error
        return sock, replace(self, port=sock.getsockname()[1])

    def _why_not(self, error: OSError) -> str:
        text = f"--bind {self.host}:{self.port}: {error.strerror or error}"
        if error.errno != errno.EADDRINUSE:
            return f"{text}."
        holder = next((o for o in others() if o.port == self.port), None)
        if holder is None:
            return f"{text}, by another program: choose another port with --bind {self.host}:PORT."
        return (
            f"{text}, by the run {holder.run} (process {holder.pid}): submit to that one, or choose another port with"
            f" --bind {self.host}:PORT."
        )


@contextlib.contextmanager
def listening(app: Any, sock: socket.socket, bind: Bind) -> Iterator[None]:
    """Answer requests in a thread, until the end of the ``with``."""
    config = uvicorn.Config(
        app,
        http=BoundedConnection,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        log_level="critical",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_AT_ONCE,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=3600,  # connections that are idle are BoundedConnection's affair
        ssl_certfile=bind.certificate,
        ssl_keyfile=bind.private_key,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="jobs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(timeout=STOP_S)
        sock.close()
