"""The HTTP server in front of a front door: uvicorn with the settings that matter here, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import uvicorn

from longtail.core.errors import ConfigError
from longtail.serve.front import FrontDoor

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
KEEP_ALIVE_S = 75
BACKLOG = 4096


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Where to listen; with a certificate and its key, by TLS."""

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    private_key: Path | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.certificate else 'http'}://{host}:{self.port}"

    def check(self, *, keys: bool, open_to_all: bool) -> None:
        """Raises :class:`ConfigError` for half a certificate, files that are none, and for a server that anybody on
        the network could use unless that is wanted."""
        if (self.certificate is None) != (self.private_key is None):
            raise ConfigError("TLS needs both: --tls-cert and --tls-key.")
        if self.certificate is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.private_key)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"{self.certificate}, {self.private_key}: no usable certificate: {error}") from error
        if self.host not in LOOPBACK and not keys and not open_to_all:
            raise ConfigError(
                f"--host {self.host} is open to the network: give --keys FILE (longtail keys new NAME) or say --no-auth"
            )


class _Server(uvicorn.Server):
    """Tells the door about the end before uvicorn waits for its requests."""

    def __init__(self, config: uvicorn.Config, ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._ending = ending
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        self._ending()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's own, which raises the signal again at the end: that would kill the process before all is put
        away. A second Ctrl-C does not wait."""
        self._loop.call_soon_threadsafe(self._ending)
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


async def serve(door: FrontDoor, listen: Listen, *, ready: Callable[[str, Callable[[], None]], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is under way; ``ready(url, stop)`` once requests are let in,
    ``stop()`` being the same as a SIGTERM.

    Port 0 takes a free one. Raises :class:`ConfigError` if the port is taken, and what the backend's start raises.
    """
    _raise_file_limit()
    with contextlib.closing(_bind(listen)) as sock:
        await door.start()
        try:
            config = uvicorn.Config(
                door,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(door.settings.drain_s) + 5,
                ssl_certfile=listen.certificate,
                ssl_keyfile=listen.private_key,
            )
            server = _Server(config, door.drain)
            url = replace(listen, port=sock.getsockname()[1]).url
            asyncio.get_running_loop().call_soon(ready, url, server.stop)
            await server.serve(sockets=[sock])
        finally:
            await door.close()


def _bind(listen: Listen) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        return sock
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {listen.host}:{listen.port}: {reason}; choose another --port") from error


def _raise_file_limit() -> None:
    """Every stream takes two sockets; the soft limit of 1,024 files is that of another age."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
