"""The Transport contract over a TCP or Unix socket, the same on asyncio and trio.

Small transfers stay on the event loop: try the system call, and only if it would block wait for readiness.
With a socket buffer of 200 KiB that costs one trip through the loop for each 200 KiB, which is several times
slower than the kernel can copy. A transfer of BULK_BYTES or more, and every range of a file, is therefore
pumped by one worker thread in blocking system calls, without the GIL.

The descriptor is in blocking mode for the threads' sake; the loop's calls say MSG_DONTWAIT. A thread never
parks: the socket's own time limit (STALL_SECONDS) ends a system call that moves nothing, and the rest goes
back to the loop, which waits for readiness as usual. So a silent or slow peer costs no thread, and threads
can be bounded for a whole process.

Measured on loopback against a bare sendfile -> recv_into loop: non-blocking calls plus poll in the thread
lose 6% on Unix sockets; one recvmsg_into over many pages loses half on TCP, where the receiver then holds
the socket's lock for the whole vector. Hence one recv_into for each large piece, and vectors for small ones.

Cancelling a bulk transfer: if bytes have moved, the socket is aborted, which ends the thread's system call;
then the call waits for the thread to leave. That wait is short by construction, and a limit could only break
the promise that nobody touches the caller's memory once the call is over.
"""

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, MutableSequence, Sequence
from typing import Protocol

import anyio
import anyio.lowlevel
import anyio.to_thread

from .base import FileRange, Half, Part, Progress
from .endpoints import TCPEndpoint, UnixEndpoint

BULK_BYTES = 256 << 10  # from here on a worker thread does the copying
STALL_SECONDS = 0.02  # a thread that moved nothing for so long goes home
MAX_VIEWS = 512  # pieces in one system call; IOV_MAX is 1024
RECEIVE_BYTES = 256 << 10  # by one system call: what it brought is still in the cache for `progress`
LARGE_BYTES = 64 << 10  # received by a system call of its own
SENDFILE_BYTES = 8 << 20  # in one system call, so that abort() is noticed
KEEPALIVE_IDLE_SECONDS = 30
KEEPALIVE_INTERVAL_SECONDS = 10
KEEPALIVE_PROBES = 3
MAX_DESCRIPTORS = 16  # received by one system call; nobody has a reason to send more than one
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
_WASTE_BYTES = 64 << 10

WOULD_BLOCK = -1
AGAIN = -2  # something has moved, but no byte of the caller's yet


class Work(Protocol):
    """One transfer: what is to be moved, and how far it is."""

    has_moved: bool  # from here on, a transfer that is given up takes the stream with it
    is_withdrawn: bool

    @property
    def left_bytes(self) -> int:
        """The transfer is over when it is 0."""
        ...

    @property
    def is_bulk(self) -> bool:
        """Whether the rest is work for a thread."""
        ...

    def step(self, sock: socket.socket, *, may_wait: bool) -> int:
        """One system call. Returns bytes moved; 0: the stream has ended; WOULD_BLOCK; AGAIN."""
        ...

    def let_go(self) -> None:
        """Keep no view of the memory, and nothing that may have one."""
        ...


class _Incoming:
    """Memory to fill, and how far it is filled. `step` is one system call."""

    def __init__(self, buffers: Sequence[memoryview], progress: Progress | None = None) -> None:
        self._views = [view.cast("B") for view in buffers if view.nbytes]
        self._progress = progress
        self._at = 0
        self.left_bytes = sum(map(len, self._views))
        self.has_moved = False
        self.is_withdrawn = False

    def step(self, sock: socket.socket, *, may_wait: bool) -> int:
        """Bytes moved; 0: the stream has ended; WOULD_BLOCK."""
        at, views = self._at, self._views
        flags = 0 if may_wait else socket.MSG_DONTWAIT
        try:
            if len(views[at]) >= LARGE_BYTES or at + 1 == len(views):
                count = sock.recv_into(views[at], min(len(views[at]), RECEIVE_BYTES), flags)
            else:
                count = sock.recvmsg_into(views[at : at + MAX_VIEWS], 0, flags)[0]
        except BlockingIOError:
            return WOULD_BLOCK
        if count:
            self.has_moved = True
            self.left_bytes -= count
            self._at = _advance(views, at, count)
            if self._progress is not None:
                self._progress(count)
        return count

    @property
    def is_bulk(self) -> bool:
        """Whether the rest is work for a thread."""
        return self.left_bytes >= BULK_BYTES

    def let_go(self) -> None:
        """Keep no view of the memory, and nothing that may have one."""
        self._views.clear()
        self._progress = None


class _Outgoing:
    """Parts to send, and how far they are sent. `step` is one system call."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._queue: list[list[memoryview] | FileRange] = []
        self.left_bytes = 0
        self.has_moved = False
        self.is_withdrawn = False
        for part in parts:
            if isinstance(part, FileRange):
                if part.length:
                    self._queue.append(part)
                    self.left_bytes += part.length
                continue
            view = memoryview(part).cast("B")
            if not len(view):
                continue
            self.left_bytes += len(view)
            if self._queue and isinstance(self._queue[-1], list):
                self._queue[-1].append(view)
            else:
                self._queue.append([view])
        self._queue.reverse()
        self._at = 0

    def step(self, sock: socket.socket, *, may_wait: bool) -> int:
        """Bytes moved; 0 never; WOULD_BLOCK."""
        head = self._queue[-1]
        try:
            if isinstance(head, FileRange):
                count = self._send_file(sock, head)
            else:
                count = self._send_views(sock, head, 0 if may_wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return WOULD_BLOCK
        self.has_moved = True
        self.left_bytes -= count
        return count

    @property
    def is_bulk(self) -> bool:
        """Whether the rest is work for a thread. sendfile always is: it may wait for the disk."""
        return self.left_bytes >= BULK_BYTES or isinstance(self._queue[-1], FileRange)

    def let_go(self) -> None:
        """Keep no view of the memory."""
        for part in self._queue:
            if isinstance(part, list):
                part.clear()
        self._queue.clear()

    def _send_views(self, sock: socket.socket, views: list[memoryview], flags: int) -> int:
        at = self._at
        if len(self._queue) > 1 or at + MAX_VIEWS < len(views):
            flags |= socket.MSG_MORE
        if at + 1 == len(views):
            count = sock.send(views[at], flags)
        else:
            count = sock.sendmsg(views[at : at + MAX_VIEWS], (), flags)
        self._at = _advance(views, at, count)
        if self._at == len(views):
            self._queue.pop()
            self._at = 0
        return count

    def _send_file(self, sock: socket.socket, head: FileRange) -> int:
        count = os.sendfile(sock.fileno(), head.fd, head.offset, min(head.length, SENDFILE_BYTES))
        if count == 0:
            raise OSError(errno.EIO, "the file is shorter than the range to send")
        self._queue.pop()
        if count < head.length:
            self._queue.append(FileRange(head.fd, head.offset + count, head.length - count))
        return count


def _advance(views: list[memoryview], at: int, count: int) -> int:
    """Drop `count` bytes from `views[at:]`; returns the index of the first view with something left."""
    while count:
        view = views[at]
        if count < len(view):
            views[at] = view[count:]
            return at
        count -= len(view)
        at += 1
    return at


class SocketTransport:
    """A connected stream socket. Takes ownership: `aclose` closes it.

    `limiter` bounds the worker threads that this and other transports use at the same time; by default each
    transport has its own two tokens, one for each direction.
    """

    def __init__(self, sock: socket.socket, *, limiter: anyio.CapacityLimiter | None = None) -> None:
        sock.setblocking(True)
        stall = struct.pack("ll", 0, round(STALL_SECONDS * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stall)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        self._sock = sock
        self._limiter = anyio.CapacityLimiter(2) if limiter is None else limiter
        self._receiving = anyio.ResourceGuard("receiving from")
        self._sending = anyio.ResourceGuard("sending to")
        self._is_aborted = False
        self._aborts = socket.SHUT_RDWR
        self._users = 0
        self._idle: anyio.Event | None = None

    @property
    def raw_socket(self) -> socket.socket:
        """The socket itself: for its addresses and options, not for its bytes."""
        return self._sock

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        """See Transport."""
        with self._receiving, self._Use(self):
            await anyio.lowlevel.checkpoint_if_cancelled()
            work = self._incoming(buffers, None)
            count = work.step(self._sock, may_wait=False)
            if count >= 0:
                await anyio.lowlevel.cancel_shielded_checkpoint()
                return count
            while count < 0:
                if count == WOULD_BLOCK:
                    await anyio.wait_readable(self._sock)
                count = work.step(self._sock, may_wait=False)
            return count

    async def receive_exactly(self, buffers: Sequence[memoryview], progress: Progress | None = None) -> None:
        """See Transport."""
        with self._receiving, self._Use(self):
            await self._move(self._incoming(buffers, progress), anyio.wait_readable)

    async def send(self, parts: Sequence[Part]) -> None:
        """See Transport."""
        with self._sending, self._Use(self):
            await self._move(self._outgoing(parts), anyio.wait_writable)

    async def send_file(self, fd: int, offset: int, length: int) -> None:
        """See Transport."""
        await self.send([FileRange(fd, offset, length)])

    def abort(self) -> None:
        """See Transport."""
        if self._is_aborted:
            return
        self._is_aborted = True
        with contextlib.suppress(OSError):  # not connected any more: what we want
            self._sock.shutdown(self._aborts)

    @property
    def carries_descriptors(self) -> bool:
        """See LocalTransport."""
        return self._sock.family == socket.AF_UNIX

    async def send_with_descriptor(self, data: bytes, descriptor: int) -> None:
        """See LocalTransport."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
        with self._sending, self._Use(self):
            await anyio.lowlevel.checkpoint_if_cancelled()
            while True:
                if self._is_aborted:
                    raise ConnectionAbortedError(errno.ECONNABORTED, "aborted by this side")
                try:
                    count = self._sock.sendmsg([data], rights, socket.MSG_DONTWAIT)
                    break
                except BlockingIOError:
                    await anyio.wait_writable(self._sock)
            try:
                await self._move(_Outgoing([data[count:]]), anyio.wait_writable)
            except BaseException:
                self.abort()
                raise

    async def receive_with_descriptors(
        self, buffers: Sequence[memoryview], descriptors: MutableSequence[int | None]
    ) -> int:
        """See LocalTransport."""
        views = [view.cast("B") for view in buffers if view.nbytes][:MAX_VIEWS]
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        with self._receiving, self._Use(self):
            await anyio.lowlevel.checkpoint_if_cancelled()
            has_waited = False
            while True:
                try:
                    count, ancillary, told, _ = self._sock.recvmsg_into(views, _ANCILLARY_BYTES, flags)
                    break
                except BlockingIOError:
                    has_waited = True
                    await anyio.wait_readable(self._sock)
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.extend(struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4]))
            if told & socket.MSG_CTRUNC:
                descriptors.append(None)  # more than MAX_DESCRIPTORS, or this process has no room for them
            if not has_waited:
                await anyio.lowlevel.cancel_shielded_checkpoint()
            return count

    def abort_only(self, half: Half) -> None:
        """See LocalTransport."""
        self._aborts = socket.SHUT_WR if half is Half.SENDING else socket.SHUT_RD

    async def wait_peer_closed(self) -> None:
        """See LocalTransport."""
        waste = bytearray(_WASTE_BYTES)
        with self._receiving, self._Use(self):
            while True:
                try:
                    if not self._sock.recv_into(waste, 0, socket.MSG_DONTWAIT):
                        return
                    await anyio.lowlevel.checkpoint()
                except BlockingIOError:
                    await anyio.wait_readable(self._sock)
                except OSError:  # reset: it closed without having read everything
                    return

    async def aclose(self) -> None:
        """See Transport. Shielded: whoever is inside has been woken and leaves by itself."""
        self.abort()
        if self._users:
            if self._aborts != socket.SHUT_RDWR:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            idle = self._idle = self._idle or anyio.Event()
            with anyio.CancelScope(shield=True):
                await idle.wait()
        self._sock.close()

    class _Use:
        """Somebody is inside a method; the descriptor must stay open (its number could be another's)."""

        def __init__(self, owner: "SocketTransport") -> None:
            self._owner = owner

        def __enter__(self) -> None:
            self._owner._users += 1

        def __exit__(self, *_: object) -> None:
            owner = self._owner
            owner._users -= 1
            if owner._idle is not None and not owner._users:
                owner._idle.set()

    def _incoming(self, buffers: Sequence[memoryview], progress: Progress | None) -> Work:
        return _Incoming(buffers, progress)

    def _outgoing(self, parts: Sequence[Part]) -> Work:
        return _Outgoing(parts)

    async def _move(self, work: Work, wait: Callable[[socket.socket], Awaitable[None]]) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()
        try:
            while work.left_bytes:
                if self._is_aborted:
                    raise ConnectionAbortedError(errno.ECONNABORTED, "aborted by this side")
                if work.is_bulk:
                    count = await self._hop(work)
                else:
                    count = work.step(self._sock, may_wait=False)
                if count == 0:
                    raise EOFError(f"the stream ended {work.left_bytes} bytes early")
                if count == WOULD_BLOCK:
                    await wait(self._sock)
        except BaseException:
            if work.has_moved:
                self.abort()
            raise
        finally:
            # An idle worker thread keeps its last job's arguments: the caller's memory must not hang on them.
            work.let_go()

    async def _hop(self, work: Work) -> int:
        gate = threading.Lock()
        try:
            return await anyio.to_thread.run_sync(
                self._pump, work, gate, abandon_on_cancel=True, limiter=self._limiter
            )
        except anyio.get_cancelled_exc_class():
            # The thread may not have started, be inside, or be gone; whoever has the gate decides. If nothing
            # has moved, it leaves within STALL_SECONDS, and the stream stays whole.
            work.is_withdrawn = True
            if work.has_moved:
                self.abort()
            if not gate.acquire(blocking=False):
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(gate.acquire)
            gate.release()  # a thread that comes to it only now sees that the work is withdrawn, and leaves
            raise

    def _pump(self, work: Work, gate: threading.Lock) -> int:
        """In a worker thread: move until done, ended, aborted, or stalled."""
        with gate:
            while work.left_bytes and not self._is_aborted and not work.is_withdrawn:
                count = work.step(self._sock, may_wait=True)
                if count <= 0 and count != AGAIN:
                    return count
            return 1


async def dial(endpoint: TCPEndpoint | UnixEndpoint) -> socket.socket:
    """Connect to `endpoint`; the first address that answers wins. Raises OSError.

    Takes as long as the system lets it: bound it with `anyio.fail_after`. Cancellation leaves no socket.
    """
    if isinstance(endpoint, UnixEndpoint):
        return await _dial(socket.AF_UNIX, endpoint.path)
    addresses = await anyio.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    problem: OSError | None = None
    for family, _kind, _proto, _name, address in addresses:
        try:
            return await _dial(family, address)
        except OSError as exc:
            problem = exc
    raise problem or OSError(f"{endpoint} has no address")


def is_self_connected(sock: socket.socket) -> bool:
    """Whether `sock` talks to itself.

    Dialling a loopback port of the ephemeral range on which nobody listens can be given that very port as its
    own, and TCP's simultaneous open then succeeds: the client would hear its own HELLO, and keep the gateway
    from its port.
    """
    return sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername()


async def _dial(family: int, address: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        try:
            sock.connect(address)  # type: ignore[arg-type]
        except BlockingIOError as exc:
            if exc.errno != errno.EINPROGRESS:
                raise  # a Unix listener with a full backlog: not "in progress", nothing will wake us
            await anyio.wait_writable(sock)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code)) from None
        if is_self_connected(sock):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there but this very socket")
        await anyio.lowlevel.checkpoint()
    except BaseException:
        sock.close()
        raise
    return sock
