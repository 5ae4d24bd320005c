"""The Transport contract over TLS: the socket transport, with OpenSSL between memory and socket.

OpenSSL works on memory (`ssl.MemoryBIO`), so the socket stays ours: the same system calls, waiting, worker
threads and cancellation as without TLS. `_Cipher` is all of OpenSSL that there is; one lock guards it, held
for one call at a time, because the two directions may be in two threads and OpenSSL's object is not made for
that. Nothing waits for the network under the lock.

Receiving: OpenSSL deciphers straight into the caller's memory, a record (16 KiB) at a time. What has been
taken from the socket and not been asked for stays in its buffer, at most `RECEIVE_BYTES` and a record, so a
cancelled receive loses nothing. Sending: a piece (`PIECE_BYTES`, also of a file) is enciphered, then sent;
only the sender takes from OpenSSL's buffer, so records leave in the order in which they were numbered. A
piece that has been enciphered counts as sent: its number is used up, so a send that is given up then ends the
stream.

The end: only the peer's close_notify is one. A connection that is cut, or whose FIN somebody forged, is a
TLSFailure (an OSError), wherever in the stream it happens.
"""

import contextlib
import errno
import os
import socket
import ssl
import threading
from collections.abc import Sequence

import anyio
import anyio.lowlevel

from .base import FileRange, Part, Progress
from .sockets import AGAIN, BULK_BYTES, WOULD_BLOCK, SocketTransport
from .trust import TLSFailure, failure

RECORD_BYTES = 16 << 10  # the most that TLS puts into one record
RECEIVE_BYTES = 64 << 10  # by one system call
DELIVER_BYTES = 256 << 10  # deciphered in a row: still in the cache for `progress`
PIECE_BYTES = 256 << 10  # enciphered in a row
MAX_UNASKED_BYTES = 64 << 10  # of answers that the peer makes OpenSSL write while nothing is sent

FAILED = -3  # beside AGAIN and WOULD_BLOCK


class _Cipher:
    """OpenSSL's half of a connection. Each method may be called in any thread; none waits for the network."""

    def __init__(self, context: ssl.SSLContext, server_name: str | None, is_server: bool) -> None:
        self._lock = threading.Lock()
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._is_writing = False  # what is in `_out` is, for the greater part, the sender's own
        self.failure: TLSFailure | None = None  # what `read` met; raise a copy, or it keeps the frames
        try:
            self._object = context.wrap_bio(
                self._in, self._out, server_side=is_server, server_hostname=server_name
            )
        except ValueError as exc:  # a name that can be in no certificate
            raise TLSFailure(f"{server_name!r} is not a host's name: {exc}", is_lasting=True) from None

    def feed(self, raw: bytes) -> None:
        """What came from the socket; empty: it has ended."""
        with self._lock:
            if raw:
                self._in.write(raw)
            else:
                self._in.write_eof()

    def read(self, view: memoryview) -> int:
        """Decipher into `view`. Returns bytes; 0: the peer said that it is over; WOULD_BLOCK; FAILED.

        It does not raise what went wrong: an exception keeps the frames that it came through, and so `view`.
        """
        with self._lock:
            if self.failure is not None:
                return FAILED
            try:
                return self._object.read(len(view), view)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                if self._is_writing or self._out.pending <= MAX_UNASKED_BYTES:
                    return WOULD_BLOCK
                self.failure = TLSFailure("the other end sends nothing but requests of TLS")
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError as exc:
                self.failure = failure(exc)
            return FAILED

    def write(self, data: bytes | memoryview) -> None:
        """Encipher all of `data`; `take` it soon."""
        with self._lock:
            self._is_writing = True
            try:
                sent = 0
                while sent < len(data):
                    sent += self._object.write(data[sent:] if sent else data)
            except ssl.SSLError as exc:
                raise failure(exc) from exc

    def take(self) -> bytes:
        """What is to be sent."""
        with self._lock:
            self._is_writing = False
            return self._out.read()

    def shake_hands(self) -> bool:
        """As far as it goes without more from the peer; whether it is done."""
        with self._lock:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLError as exc:
                raise failure(exc) from exc
            return True

    def say_end(self) -> bytes:
        """What tells the peer that nothing more will come."""
        with self._lock:
            with contextlib.suppress(ssl.SSLError):  # that the peer has not said so too
                self._object.unwrap()
            return self._out.read()


class _Incoming:
    """Memory to fill with what was deciphered. See Work."""

    def __init__(
        self, transport: "TLSTransport", buffers: Sequence[memoryview], progress: Progress | None
    ) -> None:
        self._transport = transport
        self._views = [view.cast("B") for view in buffers if view.nbytes]
        self._views.reverse()
        self._progress = progress
        self.left_bytes = sum(map(len, self._views))
        self.has_moved = False
        self.is_withdrawn = False

    @property
    def is_bulk(self) -> bool:
        return self.left_bytes >= BULK_BYTES

    def step(self, sock: socket.socket, *, may_wait: bool) -> int:
        count = self._decipher()
        if count >= 0:
            return count
        if count == FAILED and (reason := self._transport.cipher.failure) is not None:
            raise TLSFailure(str(reason), is_lasting=reason.is_lasting)
        try:
            raw = sock.recv(RECEIVE_BYTES, 0 if may_wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return WOULD_BLOCK
        if not raw and self._transport.is_aborted:
            raise ConnectionAbortedError(errno.ECONNABORTED, "aborted by this side")
        self._transport.cipher.feed(raw)
        return AGAIN

    def _decipher(self) -> int:
        """As much as is there and wanted: bytes; 0: the end; WOULD_BLOCK: there is nothing; FAILED."""
        total = 0
        while self._views and total < DELIVER_BYTES:
            view = self._views[-1]
            count = self._transport.cipher.read(view)
            if count <= 0:
                if not total:
                    return count
                break  # it will be said again, when what came before has been delivered
            self.has_moved = True
            self.left_bytes -= count
            total += count
            if count < len(view):
                self._views[-1] = view[count:]
            else:
                self._views.pop()
        if self._progress is not None:
            self._progress(total)
        return total

    def let_go(self) -> None:
        self._views.clear()
        self._progress = None  # it may have one too


class _Outgoing:
    """Parts to encipher and send. See Work."""

    def __init__(self, cipher: _Cipher, parts: Sequence[Part]) -> None:
        self._cipher = cipher
        self._queue: list[memoryview | FileRange] = []
        self._plain_bytes = 0
        for part in parts:
            piece = part if isinstance(part, FileRange) else memoryview(part).cast("B")
            length = piece.length if isinstance(piece, FileRange) else len(piece)
            if length:
                self._queue.append(piece)
                self._plain_bytes += length
        self._queue.reverse()
        self._unsent = memoryview(b"")
        self.has_moved = False
        self.is_withdrawn = False

    @property
    def left_bytes(self) -> int:
        return self._plain_bytes + len(self._unsent)

    @property
    def is_bulk(self) -> bool:
        return self.left_bytes >= BULK_BYTES or bool(self._queue and isinstance(self._queue[-1], FileRange))

    def step(self, sock: socket.socket, *, may_wait: bool) -> int:
        if not len(self._unsent):
            self._encipher(may_read=may_wait)
        flags = 0 if may_wait else socket.MSG_DONTWAIT
        if self._queue:
            flags |= socket.MSG_MORE
        try:
            count = sock.send(self._unsent, flags)
        except BlockingIOError:
            return WOULD_BLOCK
        self._unsent = self._unsent[count:]
        return count

    def _encipher(self, *, may_read: bool) -> None:
        """The next PIECE_BYTES or so; from files only where waiting for the disk is allowed."""
        done = 0
        while self._queue and done < PIECE_BYTES:
            if isinstance(self._queue[-1], FileRange) and done and not may_read:
                break
            piece = self._next(PIECE_BYTES - done)
            self.has_moved = True
            self._cipher.write(piece)
            self._plain_bytes -= len(piece)
            done += len(piece)
        self._unsent = memoryview(self._cipher.take())

    def _next(self, limit: int) -> bytes | memoryview:
        head = self._queue.pop()
        if isinstance(head, FileRange):
            data = os.pread(head.fd, min(head.length, limit), head.offset)
            if not data:
                raise OSError(errno.EIO, "the file is shorter than the range to send")
            if len(data) < head.length:
                self._queue.append(FileRange(head.fd, head.offset + len(data), head.length - len(data)))
            return data
        if len(head) >= RECORD_BYTES or not self._queue or isinstance(self._queue[-1], FileRange):
            if len(head) > limit:
                self._queue.append(head[limit:])
            return head[:limit]
        # Small pieces share a record: each costs as much as a record that is full.
        together = [head]
        room = RECORD_BYTES - len(head)
        while room and self._queue and not isinstance(following := self._queue[-1], FileRange):
            self._queue.pop()
            together.append(following[:room])
            if len(following) > room:
                self._queue.append(following[room:])
            room -= len(together[-1])
        return b"".join(together)

    def let_go(self) -> None:
        self._queue.clear()
        self._plain_bytes = 0


class TLSTransport(SocketTransport):
    """TLS on a connected stream socket, which it owns. `handshake` comes first.

    `server_name` is what the peer's certificate must be for; None on the side of the gateway.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_name: str | None = None,
        limiter: anyio.CapacityLimiter | None = None,
    ) -> None:
        super().__init__(sock, limiter=limiter)
        self.cipher = _Cipher(context, server_name, is_server=server_name is None)

    async def handshake(self) -> None:
        """Raises OSError; a TLSFailure says why. The transport is aborted then, and if cancelled.

        Takes as long as the peer lets it: bound it with `anyio.fail_after`.
        """
        with self._receiving, self._sending, self._Use(self):
            try:
                is_done = False
                while not is_done:
                    await anyio.lowlevel.checkpoint()
                    try:
                        is_done = self.cipher.shake_hands()
                    finally:
                        await self._send_raw(self.cipher.take())  # of a failure too: the peer is told why
                    if not is_done:
                        await self._feed()
            except BaseException:
                self.abort()
                raise

    async def _send_raw(self, raw: bytes) -> None:
        while raw:
            try:
                raw = raw[self._sock.send(raw, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                await anyio.wait_writable(self._sock)

    async def _feed(self) -> None:
        while True:
            try:
                raw = self._sock.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await anyio.wait_readable(self._sock)
                continue
            if not raw:
                raise TLSFailure("the other end closed the connection instead of finishing TLS's handshake")
            self.cipher.feed(raw)
            return

    @property
    def is_aborted(self) -> bool:
        """Whether this side has ended the stream."""
        return self._is_aborted

    async def aclose(self) -> None:
        """See Transport. What is closed between two sends ends with TLS's own word for it."""
        if not self._is_aborted:
            with contextlib.suppress(OSError, anyio.BusyResourceError), self._sending:
                self._sock.send(self.cipher.say_end(), socket.MSG_DONTWAIT)
        await super().aclose()

    def _incoming(self, buffers: Sequence[memoryview], progress: Progress | None) -> _Incoming:
        return _Incoming(self, buffers, progress)

    @property
    def carries_descriptors(self) -> bool:
        """See LocalTransport: nothing goes past the cipher."""
        return False

    def _outgoing(self, parts: Sequence[Part]) -> _Outgoing:
        return _Outgoing(self.cipher, parts)
