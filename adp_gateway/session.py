"""One connection: `protocol.Connection(Role.GATEWAY)` on one side, an `ObjectStore` on the other.

    reader    the only task that receives; takes requests, finds memory for payloads, answers EXIST and PING
    writer    the only task that sends (`outbox`)
    requests  one task for each READ, DELETE and CHECK, one for each frame of a WRITE; the window bounds them

Everything lives in the session's task group. Leaving it, for whatever reason, cancels what is under way,
releases every lease and block, and closes the socket; what a dead client had half written is gone with its
memory. Requests of a connection run side by side; `fences` says which may start.
"""

import contextlib
import errno
import hmac
import logging
import math
from collections.abc import Sequence
from typing import cast

import anyio
import anyio.abc
import attrs

from adp_client.protocol.connection import Connection
from adp_client.protocol.constants import CRITICAL_EXTENSION, VERSION, ErrorCode, Feature, Role
from adp_client.protocol.errors import RemoteProtocolError
from adp_client.protocol.events import (
    Event,
    HelloReceived,
    NoticeReceived,
    PayloadExpected,
    PeerClosed,
    RequestReceived,
)
from adp_client.protocol.messages import (
    Check,
    Delete,
    Exist,
    ExistReply,
    Fence,
    Goodbye,
    GoodbyeReply,
    Hello,
    Ping,
    Pong,
    Read,
    ReadItem,
    ReadReply,
    Reply,
    Request,
    StatusReply,
    Welcome,
    Write,
)
from adp_client.protocol.state import State
from adp_client.transport import FileRange, Transport
from adp_client.transport.base import Part

from .admission import request_bytes
from .buffers import Block, lay_out
from .errors import CorruptRecord, DeviceFull, StorageError
from .fences import Era, Fences
from .outbox import Frame, Outbox
from .replies import (
    EXIST_HEAD_BYTES,
    MIN_BODY_BYTES,
    PORTION_BYTES,
    Found,
    cut_extents,
    portions,
    read_frames,
    status_replies,
)
from .shared import Shared
from .store.base import PutItem, ReadLease

log = logging.getLogger(__name__)


@attrs.define(eq=False)
class _OpenObject:
    """An object whose last byte has not come yet. `memory` is None if there was none to be had."""

    index: int
    block: Block
    memory: memoryview | None


@attrs.define(eq=False)
class _Batch:
    """The objects that one frame of a WRITE completes, and the memory they lie in."""

    indices: list[int] = attrs.field(factory=list)
    items: list[PutItem] = attrs.field(factory=list)
    blocks: list[Block] = attrs.field(factory=list)

    def release(self) -> None:
        self.items.clear()
        for block in self.blocks:
            block.release()


@attrs.define(eq=False)
class _Write:
    """A WRITE from its first frame to its reply."""

    era: Era
    cost_bytes: int
    is_refused: bool
    statuses: bytearray = attrs.field(factory=bytearray)
    open: _OpenObject | None = None
    batch: _Batch | None = None  # of the frame whose payload is on its way
    puts: int = 0
    is_asked: bool = False

    @property
    def is_holding(self) -> bool:
        """Whether memory is kept for bytes that its client still owes."""
        blocks = [] if self.batch is None else list(self.batch.blocks)
        if self.open is not None:
            blocks.append(self.open.block)
        return any(block.length for block in blocks)

    def release(self) -> None:
        """Its connection is gone."""
        if self.open is not None:
            self.open.block.release()
        if self.batch is not None:
            self.batch.release()


class Session:
    """Serves one transport, which it owns."""

    def __init__(self, transport: Transport, shared: Shared, *, peer: str) -> None:
        self._transport = transport
        self._shared = shared
        self._store = shared.store
        self._peer = peer
        self._connection = Connection(Role.GATEWAY)
        self._outbox = Outbox(
            max_queued_bytes=shared.max_queued_bytes, send_seconds=shared.patience.send_seconds
        )
        self._fences = Fences()
        self._writes: dict[int, _Write] = {}
        self._max_payload_bytes = self._max_body_bytes = 0
        self._deadline = anyio.CancelScope()
        self._patient_again = -math.inf  # when this connection may wait for memory again
        self._received_bytes = 0  # counted wherever they arrive, also in a thread
        self._stalled: tuple[int, float] | None = None  # what had come when others were first seen waiting
        self._is_in_the_way = False
        self._over = anyio.CancelScope()
        self._is_over = False
        self._is_at_fault = False
        self._sent = anyio.Event()
        self._draining = anyio.Event()

    async def run(self) -> None:
        """Serve until the peer leaves, breaks the protocol, or has been drained. Raises nothing but bugs.

        Cancelled: the connection is aborted at once.
        """
        self._shared.counters.sessions += 1
        self._shared.counters.sessions_opened += 1
        self._shared.arena.on_shortage.add(self._give_way)
        try:
            async with anyio.create_task_group() as tasks:
                self._over = tasks.cancel_scope
                tasks.start_soon(self._send)
                tasks.start_soon(self._leave_when_drained)
                violation = await self._receive()
                if violation is not None:
                    await self._say_why(violation)
                tasks.cancel_scope.cancel()
        finally:
            self._is_over = True
            self._shared.arena.on_shortage.discard(self._give_way)
            self._outbox.close()
            for write in self._writes.values():
                write.release()
                self._shared.admission.leave(write.cost_bytes)
            self._shared.counters.sessions -= 1
            await self._transport.aclose()

    def drain(self) -> None:
        """Ask the client to leave: it is told, what it asked is answered, then the connection closes."""
        self._draining.set()

    # ------------------------------------------------------------ receiving

    async def _receive(self) -> RemoteProtocolError | None:
        """The reader. Returns what the peer did wrong, or None if it is gone; requests have ended then."""
        violation: RemoteProtocolError | None = None
        async with anyio.create_task_group() as requests:
            with self._deadline:
                self._deadline.deadline = anyio.current_time() + self._shared.patience.hello_seconds
                violation = await self._take_events(requests)
            if self._deadline.cancelled_caught:
                reason = "no progress in a frame that had begun"
                if self._is_in_the_way:
                    reason += ", and others wait for the memory"
                violation = RemoteProtocolError(reason, ErrorCode.TIMED_OUT)
            self._is_over = True
            requests.cancel_scope.cancel()
        for write in self._writes.values():
            write.release()  # now, not after the farewell: others may be waiting for the memory
        return violation

    async def _take_events(self, requests: anyio.abc.TaskGroup) -> RemoteProtocolError | None:
        connection = self._connection
        try:
            while True:
                try:
                    count = await self._receive_bytes()
                except OSError as exc:
                    log.debug("%s: %s", self._peer, exc)
                    return None
                connection.bytes_received(count)
                if not self._is_in_the_way:
                    self._stalled = None
                # What the gateway itself takes its time for is not held against the peer.
                deadline, self._deadline.deadline = self._deadline.deadline, math.inf
                has_progressed = False
                while (event := connection.next_event()) is not None:
                    if isinstance(event, PeerClosed):
                        return None
                    if isinstance(event, NoticeReceived):
                        log.info("%s: the client ended the connection: %s", self._peer, event.notice)
                        return None
                    await self._take(event, requests)
                    has_progressed = True
                if self._is_owed_bytes:
                    if has_progressed or math.isinf(deadline):
                        deadline = anyio.current_time() + self._shared.patience.frame_seconds
                    self._deadline.deadline = deadline
        except RemoteProtocolError as exc:
            return exc

    @property
    def _is_owed_bytes(self) -> bool:
        """The peer has begun something that it must finish: HELLO, a frame, a WRITE of several frames."""
        return (
            self._connection.state is State.START
            or self._connection.is_mid_frame
            or any(not write.is_asked for write in self._writes.values())
        )

    async def _receive_bytes(self) -> int:
        views = self._connection.receive_buffers()
        if not self._connection.is_receiving_payload:
            return await self._transport.receive_some(views)
        try:
            await self._transport.receive_exactly(views, self._count)
        except EOFError:
            return 0
        return sum(map(len, views))

    def _count(self, received_bytes: int) -> None:
        self._received_bytes += received_bytes

    def _give_way(self) -> None:
        """Somebody waits for memory. If it is kept here for a peer that has fallen silent, let it go.

        Silence counts from the first time that it was in somebody's way: until then the peer may take its
        time, as far as `frame_seconds` go.
        """
        if math.isinf(self._deadline.deadline) or not any(
            write.is_holding for write in self._writes.values()
        ):
            self._stalled = None
            return
        now = anyio.current_time()
        if self._stalled is None or self._stalled[0] != self._received_bytes:
            self._stalled = (self._received_bytes, now)
        elif now - self._stalled[1] >= self._shared.patience.stall_seconds:
            self._is_in_the_way = True
            self._deadline.deadline = now

    async def _take(self, event: Event, requests: anyio.abc.TaskGroup) -> None:
        match event:
            case RequestReceived(request_id=request_id, message=Write() as message, is_final=is_final):
                await self._take_write(request_id, message, is_final, requests)
            case RequestReceived(request_id=request_id, message=message):
                await self._take_request(request_id, message, requests)
            case PayloadExpected(request_id=request_id, message=Write() as message):
                self._connection.accept_payload(await self._find_memory(request_id, message))
            case HelloReceived(hello=hello):
                self._greet(hello)
            case _:
                raise AssertionError(f"not an event of a gateway: {event}")

    def _greet(self, hello: Hello) -> None:
        token = self._shared.token
        if token is not None and not hmac.compare_digest(hello.token, token):
            raise RemoteProtocolError("token missing or wrong", ErrorCode.UNAUTHENTICATED)
        if not hello.min_version <= VERSION <= hello.max_version:
            raise RemoteProtocolError(f"this gateway speaks version {VERSION}", ErrorCode.UNSUPPORTED_VERSION)
        if any(extension.tag & CRITICAL_EXTENSION for extension in hello.extensions):
            raise RemoteProtocolError("a critical extension is unknown here", ErrorCode.UNSUPPORTED_VERSION)
        if hello.max_body_bytes < MIN_BODY_BYTES:
            raise RemoteProtocolError(
                f"a client must receive bodies of {MIN_BODY_BYTES} bytes", ErrorCode.LIMIT_EXCEEDED
            )
        self._max_body_bytes = hello.max_body_bytes
        self._max_payload_bytes = hello.max_payload_bytes
        welcome = Welcome(
            features=Feature.FRAGMENTS | Feature.END_TO_END,
            boot_id=self._shared.boot_id,
            limits=self._shared.limits,
            agent=self._shared.agent,
        )
        self._outbox.put_prompt(self._connection.accept(welcome))
        log.debug("%s: %r", self._peer, hello.agent)

    # ------------------------------------------------------------ requests

    async def _take_request(self, request_id: int, message: Request, requests: anyio.abc.TaskGroup) -> None:
        self._shared.counters.requests[type(message).__name__] += 1
        if isinstance(message, (Fence, Goodbye)):
            reply = StatusReply() if isinstance(message, Fence) else GoodbyeReply()
            self._fences.bar(lambda: self._reach(request_id, reply))
            return
        if isinstance(message, (Exist, Ping)) and self._fences.current.is_open:
            self._answer_at_once(request_id, message)
            return
        cost_bytes = _cost_bytes(message)
        if not self._shared.admission.admit(cost_bytes):
            self._refuse(request_id, message, ErrorCode.OVERLOADED)
            return
        era = self._fences.enter()
        # `start` returns when the request has begun, so that what is asked first begins first.
        await requests.start(self._work, request_id, message, era, cost_bytes)

    def _reach(self, request_id: int, reply: StatusReply | GoodbyeReply) -> None:
        """A barrier: everything before it is done. Its reply overtakes none of theirs."""
        if self._is_over:
            return
        self._outbox.put_in_turn(Frame(parts=[self._connection.reply(request_id, reply)]))
        if isinstance(reply, GoodbyeReply):
            self._outbox.finish()

    async def _work(
        self,
        request_id: int,
        message: Request,
        era: Era,
        cost_bytes: int,
        *,
        task_status: anyio.abc.TaskStatus[None],
    ) -> None:
        """The task of one request. Whatever goes wrong in it is answered and goes no further.

        The reader goes on when this task waits for the first time after `started`: up to there, the store has
        pinned what a READ asked for and hidden what a DELETE named.
        """
        task_status.started()
        try:
            if not era.is_open:
                await era.opened.wait()
            match message:
                case Read():
                    await self._read(request_id, message)
                case Delete(namespace=namespace, keys=keys):
                    self._reply_statuses(request_id, await self._store.delete_many(namespace, keys))
                case Check(namespace=namespace, keys=keys):
                    self._reply_statuses(request_id, await self._store.check_many(namespace, keys))
                case Exist() | Ping():
                    self._answer_at_once(request_id, message)
                case _:
                    raise AssertionError(f"a request that the core should have refused: {message}")
        except Exception as exc:
            if not self._is_over:  # else: cancelled, but not yet told, and nobody is left to answer
                self._refuse(request_id, message, self._code_for(exc))
        finally:
            self._shared.admission.leave(cost_bytes)
        self._fences.leave(era)

    def _answer_at_once(self, request_id: int, message: Exist | Ping) -> None:
        if isinstance(message, Ping):
            self._reply(request_id, Pong(nonce=message.nonce))
            return
        try:
            statuses = self._store.exist(message.namespace, message.keys)
        except Exception as exc:
            self._refuse(request_id, message, self._code_for(exc))
            return
        step = max(1, self._max_body_bytes - EXIST_HEAD_BYTES)
        for first in range(0, len(statuses), step):
            self._reply(
                request_id,
                ExistReply(first=first, statuses=statuses[first : first + step]),
                is_final=first + step >= len(statuses),
            )

    # ------------------------------------------------------------ READ

    async def _read(self, request_id: int, message: Read) -> None:
        """Pin, verify, send. The next batch is verified while the one before it is being sent.

        A client that verifies end to end is sent the bytes as they are: its check covers all that ours would,
        and the way here too; what it finds damaged, it names in a CHECK.
        """
        is_end_to_end = Feature.END_TO_END in self._connection.features
        opened = self._store.open_read(message.namespace, message.keys)
        leases = {
            index: lease for index, lease in enumerate(opened) if lease is not None
        }  # owned by no frame yet
        try:
            failed = [
                ReadItem(index=index, status=ErrorCode.NOT_FOUND)
                for index, lease in enumerate(opened)
                if lease is None
            ]
            for index in [index for index, lease in leases.items() if not self._fits(message, index, lease)]:
                lease = leases.pop(index)
                failed.append(ReadItem(index=index, status=ErrorCode.TOO_LARGE, object_bytes=lease.length))
                lease.release()
            lengths = {index: lease.length for index, lease in leases.items()}
            batches = list(portions(lengths, self._max_payload_bytes if is_end_to_end else PORTION_BYTES))
            for number, batch in enumerate(batches, 1):
                if is_end_to_end:
                    statuses = bytes(len(batch))
                else:
                    statuses = await self._store.verify([leases[index] for index in batch])
                found: list[Found] = []
                for index, status in zip(batch, statuses, strict=True):
                    lease = leases[index]
                    if status:
                        failed.append(ReadItem(index=index, status=ErrorCode(status)))
                        leases.pop(index).release()
                    else:
                        found.append(Found(index, lease.length, lease.checksum))
                await self._send_objects(request_id, failed, found, leases, is_last=number == len(batches))
                failed = []
            if not batches:
                await self._send_objects(request_id, failed, [], leases, is_last=True)
        finally:
            for lease in leases.values():
                lease.release()

    def _fits(self, message: Read, index: int, lease: ReadLease) -> bool:
        """Whether the reader has room for the object, and frames in which it can travel."""
        return lease.length <= message.capacities[index] and (self._max_payload_bytes > 0 or not lease.length)

    async def _send_objects(
        self,
        request_id: int,
        failed: Sequence[ReadItem],
        found: Sequence[Found],
        leases: dict[int, ReadLease],
        *,
        is_last: bool,
    ) -> None:
        frames = list(
            read_frames(
                failed,
                found,
                max_payload_bytes=self._max_payload_bytes,
                max_body_bytes=self._max_body_bytes,
            )
        )
        for number, items in enumerate(frames, 1):
            is_final = is_last and number == len(frames)
            head = self._connection.reply(request_id, ReadReply(items=tuple(items)), is_final=is_final)
            parts: list[Part] = [head]
            owned: list[ReadLease] = []
            reads: list[ReadLease] = []
            payload_bytes = 0
            for item in items:
                if item.status is not ErrorCode.OK:
                    continue
                lease = leases[item.index]
                parts.extend(
                    FileRange(part.fd, part.offset, part.length)
                    for part in cut_extents(lease.extents, item.offset, item.length)
                )
                payload_bytes += item.length
                reads.append(lease)
                if item.offset + item.length == item.object_bytes:
                    owned.append(leases.pop(item.index))
            self._shared.counters.sent_bytes += payload_bytes
            await self._outbox.put(Frame(parts=parts, payload_bytes=payload_bytes, owned=owned, reads=reads))

    # ------------------------------------------------------------ WRITE

    async def _find_memory(self, request_id: int, message: Write) -> list[memoryview | None]:
        """Where the payload of one frame goes. Waiting here is the back-pressure on this connection."""
        write = self._writes.get(request_id)
        if write is None:
            write = self._begin_write(request_id, message)
        batch = write.batch = _Batch()
        if write.is_refused:
            return [None] * len(message.items)
        if not write.era.is_open and not self._fences.is_asking_before_current:
            await write.era.opened.wait()  # hold no memory behind a fence, unless frames before it are owed
        fresh = [item for item in message.items if not item.offset]
        # An object that goes on in the next frame outlives this one: its memory is a block of its own.
        spans = bool(fresh) and fresh[-1].length < fresh[-1].object_bytes
        whole, whole_bytes = lay_out([item.object_bytes for item in (fresh[:-1] if spans else fresh)])
        _, span_bytes = lay_out([fresh[-1].object_bytes] if spans else [])
        block = await self._take_block(whole_bytes + span_bytes)
        span: Block | None = None
        if block is not None:
            span = block.split(whole_bytes)
            batch.blocks.append(block)
        starts = iter(whole)
        targets: list[memoryview | None] = []
        for key, item in zip(message.keys, message.items, strict=True):
            end = item.offset + item.length
            memory: memoryview | None = None
            if item.offset:
                assert write.open is not None
                index, memory = write.open.index, write.open.memory
                if end == item.object_bytes:
                    batch.blocks.append(write.open.block)
                    write.open = None
            else:
                index = len(write.statuses)
                write.statuses.append(ErrorCode.OVERLOADED)  # unless it is stored
                if end < item.object_bytes:
                    if span is not None:
                        memory = span.view(0, item.object_bytes)
                    write.open = _OpenObject(index, span or self._shared.arena.nothing(), memory)
                elif block is not None:
                    memory = block.view(next(starts), item.object_bytes)
            if memory is not None and end == item.object_bytes:
                batch.indices.append(index)
                batch.items.append(PutItem(key=key, checksum=item.checksum, data=memory))
            targets.append(None if memory is None else memory[item.offset : end])
        return targets

    def _begin_write(self, request_id: int, message: Write) -> _Write:
        self._shared.counters.requests["Write"] += 1
        cost_bytes = _cost_bytes(message)
        is_refused = not self._shared.admission.admit(cost_bytes)
        write = _Write(self._fences.enter(), 0 if is_refused else cost_bytes, is_refused)
        write.era.asking += 1
        self._writes[request_id] = write
        return write

    async def _take_block(self, length: int) -> Block | None:
        """Memory for one frame. None: too little of it, for too long.

        The reader waits here, and with it everything that the client has asked behind this frame. So a
        connection that has waited in vain does not wait again for as long: half of its time is the client's.
        """
        if not length:
            return self._shared.arena.nothing()
        block = self._shared.arena.take_nowait(length)
        if block is not None:
            return block
        memory_seconds = self._shared.patience.memory_seconds
        if anyio.current_time() < self._patient_again:
            return None
        is_urgent = any(write.open for write in self._writes.values())
        with anyio.move_on_after(memory_seconds):
            return await self._shared.arena.take(length, is_urgent=is_urgent)
        self._patient_again = anyio.current_time() + memory_seconds
        return None

    async def _take_write(
        self, request_id: int, message: Write, is_final: bool, requests: anyio.abc.TaskGroup
    ) -> None:
        """One frame of a WRITE is in."""
        write = self._writes.get(request_id)
        if write is None or write.batch is None:  # a frame without payload: empty objects only
            await self._find_memory(request_id, message)
            write = self._writes[request_id]
        batch, write.batch = write.batch, None
        assert batch is not None
        self._shared.counters.received_bytes += sum(item.length for item in message.items)
        if is_final:
            write.is_asked = True
            write.era.asking -= 1
        if batch.items:
            write.puts += 1
            requests.start_soon(self._put, request_id, write, message.namespace, batch)
        else:
            batch.release()
            self._finish_write(request_id, write)

    async def _put(self, request_id: int, write: _Write, namespace: bytes, batch: _Batch) -> None:
        """The task of one frame of a WRITE."""
        try:
            await write.era.opened.wait()
            try:
                statuses = await self._store.put_many(namespace, batch.items)
            except Exception as exc:
                statuses = bytes([self._code_for(exc)] * len(batch.items))
            for index, status in zip(batch.indices, statuses, strict=True):
                write.statuses[index] = status
        finally:
            batch.release()
        write.puts -= 1
        self._finish_write(request_id, write)

    def _finish_write(self, request_id: int, write: _Write) -> None:
        if not write.is_asked or write.puts or self._is_over:
            return
        del self._writes[request_id]
        if not write.is_refused:
            self._shared.admission.leave(write.cost_bytes)
        if write.is_refused or set(write.statuses) == {ErrorCode.OVERLOADED}:
            # In one word if none of it was taken: that has room to say when to come back.
            self._reply(request_id, self._refusal(StatusReply, ErrorCode.OVERLOADED))
        else:
            self._reply_statuses(request_id, bytes(write.statuses))
        self._fences.leave(write.era)

    # ------------------------------------------------------------ answering

    def _reply(self, request_id: int, reply: Reply, *, is_final: bool = True) -> None:
        self._outbox.put_prompt(self._connection.reply(request_id, reply, is_final=is_final))

    def _reply_statuses(self, request_id: int, statuses: bytes) -> None:
        replies = status_replies(statuses, max_body_bytes=self._max_body_bytes)
        for number, reply in enumerate(replies, 1):
            self._reply(request_id, reply, is_final=number == len(replies))

    def _refuse(self, request_id: int, message: Request, code: ErrorCode) -> None:
        """Answer a whole request with `code`, whatever of it has been answered already."""
        kinds: dict[type, type[StatusReply | ExistReply | ReadReply]] = {Exist: ExistReply, Read: ReadReply}
        reply = self._refusal(kinds.get(type(message), StatusReply), code)
        frame = self._connection.reply(request_id, reply)
        self._outbox.put_in_turn(Frame(parts=[frame]))

    def _refusal(
        self, kind: "type[StatusReply | ExistReply | ReadReply]", code: ErrorCode
    ) -> StatusReply | ExistReply | ReadReply:
        retry_after_ms = self._shared.admission.retry_after_ms if code is ErrorCode.OVERLOADED else 0
        return kind(status=code, retry_after_ms=retry_after_ms)

    def _code_for(self, exc: Exception) -> ErrorCode:
        """What a client is told of `exc`; a bug is logged with its traceback and is nobody else's trouble."""
        self._shared.counters.faults += 1
        if isinstance(exc, StorageError):
            log.error("%s: %s", self._peer, exc)
            return _STORAGE_CODES.get(type(exc), ErrorCode.GATEWAY_FAULT)
        log.exception("%s: a request failed", self._peer, exc_info=exc)
        return ErrorCode.GATEWAY_FAULT

    # ------------------------------------------------------------ sending, and the end

    async def _send(self) -> None:
        """The writer. When it is done, so is the session."""
        try:
            await self._outbox.run(self._transport)
        except (OSError, EOFError) as exc:
            # Perhaps in the middle of a frame, which nobody can finish: only closing is left.
            log.info("%s: sending failed: %s", self._peer, exc or type(exc).__name__)
            if isinstance(exc, OSError) and exc.errno == errno.EIO:
                await self._drop_unreadable()
            self._over.cancel()
        else:
            self._sent.set()
            if not self._is_at_fault:
                self._over.cancel()

    async def _drop_unreadable(self) -> None:
        """The device, not the peer, ended a frame: find out which of its objects, so that they are misses.

        The client will ask again on another connection, and must not meet the same end there.
        """
        with anyio.move_on_after(self._shared.patience.farewell_seconds):
            await self._store.verify(cast(list[ReadLease], self._outbox.under_way))

    async def _say_why(self, violation: RemoteProtocolError) -> None:
        """Best effort, and bounded: ERROR, after the frame under way."""
        self._is_at_fault = True
        self._shared.counters.violations[violation.code.name] += 1
        log.warning("%s: closed: %s: %s", self._peer, violation.code.name, violation)
        self._outbox.finish(self._connection.error(violation.code, str(violation)))
        with anyio.move_on_after(self._shared.patience.farewell_seconds), contextlib.suppress(OSError):
            await self._sent.wait()
            # Closing with unread bytes would reset the connection, and the ERROR might be lost with it.
            waste = [memoryview(bytearray(65536))]
            while await self._transport.receive_some(waste):
                pass

    async def _leave_when_drained(self) -> None:
        """Once told to drain: GOODBYE, then the end when nothing is open and the client has had its say."""
        await self._draining.wait()
        if self._connection.state in (State.START, State.GREETING):
            self._over.cancel()
            return
        if self._connection.state is State.OPEN:
            self._outbox.put_prompt(self._connection.notice(Goodbye(code=ErrorCode.SHUTTING_DOWN)))
        while True:
            await self._fences.wait_idle()
            await self._outbox.wait_empty()
            await anyio.sleep(self._shared.patience.farewell_seconds)
            if self._fences.is_idle and self._outbox.is_empty:
                self._over.cancel()
                return


_STORAGE_CODES: dict[type[StorageError], ErrorCode] = {
    CorruptRecord: ErrorCode.CORRUPT,
    DeviceFull: ErrorCode.CAPACITY_EXHAUSTED,
}


def _cost_bytes(message: Request) -> int:
    keys = getattr(message, "keys", ())
    return request_bytes(len(keys), len(keys[0])) if keys else 0
