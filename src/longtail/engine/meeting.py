"""How the ranks of one host find each other, and notice who is gone.

Rank 0 listens on an abstract Unix socket, the others connect to it: nothing of a meeting is ever in the file system, so
a killed group leaves nothing behind that a later one could take for its own. Open files (shared memory) go over those
connections. Each rank holds the only writing end of a pipe whose reading ends its peers hold: the kernel breaks it when
the process dies, however it dies. Ranks may be threads of one process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from longtail.core.errors import PeerLost

_NOTE_BYTES = 16 * 1024
_HELLO_S = 60.0
"""How long one who connects may take to say who it is."""
_RETRY_S = 0.005
_LOOK_S = 0.1
"""How often somebody who waits looks whether that has been called off."""


class Peers:
    """The other ranks of a meeting, as open files. Raises :class:`PeerLost` where rank 0 and the others must talk.

    ``own`` is the writing end of this rank's pipe, ``watched`` has the reading ends of its peers'; both are owned.
    """

    def __init__(self, rank: int, size: int, links: dict[int, socket.socket], own: int, watched: dict[int, int]):
        self.rank, self.size = rank, size
        self._links, self._watched = links, watched
        self._ends = [io.FileIO(own, "w"), *map(io.FileIO, watched.values())]  # close themselves when forgotten
        self._poll = select.poll()
        for fd in watched.values():
            self._poll.register(fd, 0)  # only POLLHUP, which is always told
        _open.add(self)

    def gone(self) -> set[int]:
        """Peers whose process has ended or that have closed."""
        broken = {fd for fd, _ in self._poll.poll(0)} if self._watched else set()
        return {peer for peer, fd in self._watched.items() if fd in broken}

    def give(self, note: dict[str, Any], fd: int | None) -> None:
        """From rank 0 to all others: a note and an open file."""
        for peer, link in self._links.items():
            try:
                socket.send_fds(link, [json.dumps(note).encode()], [] if fd is None else [fd])
            except OSError as error:
                for other in self._links.values():
                    _tell(other, {"refused": f"rank {peer} is gone"})
                raise PeerLost(f"rank 0 of {self.size} lost a peer: rank {peer} is gone") from error

    def take(self, timeout_s: float) -> tuple[dict[str, Any], int | None]:
        """What rank 0 gives; the caller closes the file."""
        link, deadline = self._links[0], time.monotonic() + timeout_s
        me = f"rank {self.rank} of {self.size}"
        while not _readable([link], min(0.1, max(0.0, deadline - time.monotonic()))):
            if 0 in self.gone() and not _readable([link], 0):
                raise PeerLost(f"{me} lost a peer: rank 0 is gone")
            if time.monotonic() >= deadline:
                raise PeerLost(f"{me} lost a peer: rank 0 did not answer within {timeout_s:g} s")
        note, fds = _receive(link, 1)
        if note is None or "refused" in note:
            raise PeerLost(f"{me} lost a peer: {note['refused'] if note else 'rank 0 is gone'}")
        return note, fds[0] if fds else None

    def close(self) -> None:
        """Let the peers know; safe to call twice."""
        for end in self._ends:
            end.close()
        for link in self._links.values():
            link.close()


class _Patience:
    """How long to wait still: until a time-out, or until it is called off."""

    def __init__(self, timeout_s: float, called_off: Callable[[], bool]) -> None:
        self._deadline, self._called_off = time.monotonic() + timeout_s, called_off

    @property
    def left_s(self) -> float:
        return 0.0 if self._called_off() else max(0.0, self._deadline - time.monotonic())

    def until_readable(self, sockets: list[socket.socket]) -> set[socket.socket]:
        """Those that can be read; none when patience has run out."""
        while not (ready := _readable(sockets, min(_LOOK_S, self.left_s))):
            if self.left_s == 0.0:
                return set()
        return ready


def meet(
    path: Path, *, rank: int, size: int, timeout_s: float, called_off: Callable[[], bool] = lambda: False
) -> Peers:
    """Wait for all ``size`` ranks that call this with the same ``path``, a name in a folder that all of them see.

    Raises :class:`PeerLost`, which names those who did not come within ``timeout_s``, or until ``called_off``, or left
    again.
    """
    if size == 1:
        return Peers(rank, size, {}, os.open(os.devnull, os.O_WRONLY), {})
    patience = _Patience(timeout_s, called_off)
    address = _address(path)
    try:
        return _host(address, size, patience) if rank == 0 else _join(address, rank, size, patience)
    except PeerLost as error:
        raise PeerLost(f"rank {rank} of {size} did not meet its peers at {path}: {error}") from error


def _address(path: Path) -> str:
    """By the folder's identity, since a name may stand for different folders in containers that share a network."""
    folder = os.stat(path.parent)
    identity = f"{os.getuid()} {folder.st_dev} {folder.st_ino} {path.name}"
    return "\0longtail-" + hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def _host(address: str, size: int, patience: _Patience) -> Peers:
    links: dict[int, socket.socket] = {}
    try:
        with _listen(address, patience) as listener:
            while len(links) < size - 1:
                _next_guest(listener, links, size, patience)
        return Peers(0, size, links, *_hand_out_pipes(links, size))
    except BaseException as error:
        for link in links.values():
            if isinstance(error, PeerLost):
                _tell(link, {"refused": str(error)})
            link.close()
        raise


def _next_guest(listener: socket.socket, links: dict[int, socket.socket], size: int, patience: _Patience) -> None:
    ready = patience.until_readable([listener, *links.values()])
    if not ready:
        raise PeerLost(_absent(set(range(size)) - {0, *links}))
    for rank, link in links.items():
        if link in ready:
            note, _ = _receive(link, 0)
            raise PeerLost(f"rank {rank} gave up: {note['gave_up']}" if note else f"rank {rank} left again")
    _greet(listener.accept()[0], links, size)


def _listen(address: str, patience: _Patience) -> socket.socket:
    """Waits where an earlier group with this address is still meeting."""
    listener = _socket()
    while True:
        try:
            listener.bind(address)
            listener.listen(128)
            return listener
        except OSError as error:
            if error.errno != errno.EADDRINUSE or patience.left_s == 0.0:
                listener.close()
                raise PeerLost(f"another group meets there ({error.strerror})") from error
            time.sleep(_RETRY_S)


def _greet(link: socket.socket, links: dict[int, socket.socket], size: int) -> None:
    """Add one who has connected to ``links``, or refuse it; tell all who is there."""
    link.settimeout(_HELLO_S)
    note: dict[str, Any] | None = None
    if _same_user(link):
        with contextlib.suppress(OSError, ValueError):
            note = _receive(link, 0)[0]
    rank = (note or {}).get("rank")
    if note is None or note.get("size") != size:
        _tell(link, {"refused": f"rank 0 expects {size} ranks"})
        link.close()
    elif not isinstance(rank, int) or not 0 < rank < size or rank in links:
        _tell(link, {"refused": f"there is a rank {rank} already"})
        link.close()
    else:
        link.settimeout(None)
        links[rank] = link
        for other in links.values():
            _tell(other, {"present": [0, *links]})


def _hand_out_pipes(links: dict[int, socket.socket], size: int) -> tuple[int, dict[int, int]]:
    """Rank 0's own writing end, and the reading ends of the others."""
    pipes = [os.pipe() for _ in range(size)]
    try:
        for rank, link in links.items():
            ends = [pipes[rank][1], *(reading for peer, (reading, _) in enumerate(pipes) if peer != rank)]
            try:
                socket.send_fds(link, [json.dumps({"met": size}).encode()], ends)
            except OSError as error:
                raise PeerLost(f"rank {rank} left again") from error
    except BaseException:
        _close(end for pipe in pipes for end in pipe)
        raise
    _close([pipes[0][0], *(writing for _, writing in pipes[1:])])
    return pipes[0][1], {peer: reading for peer, (reading, _) in enumerate(pipes) if peer}


def _join(address: str, rank: int, size: int, patience: _Patience) -> Peers:
    present: set[int] = set()
    with contextlib.ExitStack() as undo:
        link = _connect(address, patience)
        undo.callback(link.close)
        if not _same_user(link):
            raise PeerLost("another user holds the address")
        _tell(link, {"rank": rank, "size": size})
        while True:
            if not patience.until_readable([link]):
                text = _absent(set(range(size)) - present - {0, rank} or {0})
                _tell(link, {"gave_up": text})
                raise PeerLost(text)
            note, fds = _receive(link, size)
            if note is None:
                raise PeerLost("rank 0 left again")
            if "refused" in note:
                raise PeerLost(note["refused"])
            if "met" in note:
                if len(fds) != size:
                    for fd in fds:
                        os.close(fd)
                    raise PeerLost("no file descriptor is free: raise `ulimit -n`")
                undo.pop_all()
                others = [peer for peer in range(size) if peer != rank]
                return Peers(rank, size, {0: link}, fds[0], dict(zip(others, fds[1:], strict=True)))
            present = set(note["present"])


def _connect(address: str, patience: _Patience) -> socket.socket:
    while True:
        link = _socket()
        try:
            link.connect(address)
            return link
        except OSError as error:
            link.close()
            if patience.left_s == 0.0:
                raise PeerLost(_absent({0})) from error
            time.sleep(_RETRY_S)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _absent(ranks: set[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"rank{'s' if len(ranks) > 1 else ''} {names} did not come in time"


def _tell(link: socket.socket, note: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever is gone is noticed where it is waited for
        link.send(json.dumps(note).encode())


def _receive(link: socket.socket, files: int) -> tuple[dict[str, Any] | None, list[int]]:
    """The next note and its open files; None where the other end is closed."""
    try:
        data, fds, _, _ = socket.recv_fds(link, _NOTE_BYTES, files, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None, []
    return (json.loads(data) if data else None), list(fds)


def _readable(sockets: list[socket.socket], timeout_s: float) -> set[socket.socket]:
    poll = select.poll()
    by_fd = {s.fileno(): s for s in sockets}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return {by_fd[fd] for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)}


def _same_user(link: socket.socket) -> bool:
    """An abstract address has no permissions."""
    _, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in (os.getuid(), os.geteuid())


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


_open: weakref.WeakSet[Peers] = weakref.WeakSet()


def _drop_in_child() -> None:
    for peers in list(_open):
        peers.close()


# A forked child would hold its parent's ends open beyond the parent's death.
os.register_at_fork(after_in_child=_drop_in_child)
