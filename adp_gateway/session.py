"""One connection: `protocol.Connection(Role.GATEWAY)` on one side, an `ObjectStore` on the other.

    reader    the only task that receives; takes requests, finds memory for payloads, answers EXIST and PING
    writer    the only task that sends (`outbox`)
    requests  one task for each request, but one for each frame of a WRITE; the window bounds them

Everything lives in the session's task group. Leaving it, for whatever reason, cancels what is under way,
releases every lease, pin and block, and closes the socket last of all: memory that a client shares with us is
all its own again when it sees that. What a dead client had half written is gone with its memory. Requests of
a connection run side by side; `fences` says which may start.
"""

import contextlib
import errno
import logging
import math
from typing import cast

import anyio
import anyio.abc

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
    Credit,
    Delete,
    ErrorMessage,
    Exist,
    ExistReply,
    Extension,
    Fence,
    Goodbye,
    GoodbyeReply,
    Hello,
    Notice,
    Ping,
    Pong,
    Read,
    ReadRegion,
    RegionClose,
    RegionOpen,
    Release,
    Request,
    StatusReply,
    Welcome,
    Write,
    WriteRegion,
)
from adp_client.protocol.state import State
from adp_client.transport import Half, Transport, local_transport

from .admission import message_bytes
from .answers import Answers
from .fences import Era, Fences
from .leasing import Leases
from .logs import shown
from .meter import Meter
from .outbox import Frame, Outbox
from .reading import Reads
from .regions import RegionRefused, Regions
from .replies import (
    EXIST_HEAD_BYTES,
    MIN_BODY_BYTES,
    MIN_PAYLOAD_BYTES,
)
from .shared import Shared
from .sharing import SharedTransfers
from .store.base import ReadLease
from .views import StoreView
from .writing import Writes

log = logging.getLogger(__name__)

FEATURES = Feature.LEASES | Feature.FRAGMENTS | Feature.CREDITS | Feature.END_TO_END


class Session:
    """Serves one transport, which it owns."""

    def __init__(
        self,
        transport: Transport,
        shared: Shared,
        *,
        peer: str,
        extensions: tuple[Extension, ...] = (),
    ) -> None:
        self._transport = transport
        self._local = local_transport(transport)
        self._shared = shared
        self._store = StoreView(shared.store)
        self._peer = peer
        self._extensions = extensions
        self._connection = Connection(Role.GATEWAY)
        self._outbox = Outbox(
            max_queued_bytes=shared.max_queued_bytes, send_seconds=shared.patience.send_seconds
        )
        self._meter = Meter(shared.counters.verbs)
        self._answers = Answers(
            connection=self._connection, outbox=self._outbox, shared=shared, meter=self._meter, peer=peer
        )
        self._fences = Fences()
        self._reads = Reads(self._answers, self._store)
        self._writes = Writes(self._answers, self._store, self._fences)
        self._regions = Regions(shared.region_budget)
        self._shared_transfers = SharedTransfers(self._answers, self._store, self._regions)
        self._leases = Leases(shared, self._store)
        self._deadline = anyio.CancelScope()
        self._received_bytes = 0  # counted wherever they arrive, also in a thread
        self._stalled: tuple[int, float] | None = None  # what had come when others were first seen waiting
        self._is_in_the_way = False
        self._over = anyio.CancelScope()
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
                tasks.start_soon(self._leases.expire)
                violation = await self._receive()
                if violation is not None:
                    await self._say_why(violation)
                tasks.cancel_scope.cancel()
        finally:
            self._answers.is_over = True
            self._shared.arena.on_shortage.discard(self._give_way)
            self._shared.credits.leave(self._credit)
            self._outbox.close()
            self._writes.leave()
            self._leases.leave()
            self._meter.leave()
            self._shared.counters.sessions -= 1
            try:
                await self._regions.leave()
            finally:
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
            self._answers.is_over = True
            requests.cancel_scope.cancel()
        # Now, not after the farewell: others may be waiting for the memory, or to delete. A DELETE of this
        # connection that waited for its own leases has been cancelled before they end.
        self._writes.release()
        self._leases.leave()
        return violation

    async def _take_events(self, requests: anyio.abc.TaskGroup) -> RemoteProtocolError | None:
        connection = self._connection
        try:
            while True:
                await self._wait_taken()
                try:
                    await self._receive_bytes()
                except OSError as exc:
                    log.debug("%s: %s", self._peer, exc)
                    return None
                if not self._is_in_the_way:
                    self._stalled = None
                # What the gateway itself takes its time for is not held against the peer.
                deadline, self._deadline.deadline = self._deadline.deadline, math.inf
                has_progressed = False
                while (event := connection.next_event()) is not None:
                    if isinstance(event, PeerClosed):
                        return None
                    if isinstance(event, NoticeReceived):
                        self._note_end(event.notice)
                        return None
                    await self._take(event, requests)
                    has_progressed = True
                if self._is_owed_bytes:
                    if has_progressed or math.isinf(deadline):
                        deadline = anyio.current_time() + self._shared.patience.frame_seconds
                    self._deadline.deadline = deadline
        except RemoteProtocolError as exc:
            return exc

    async def _wait_taken(self) -> None:
        """Take no more requests from a peer that takes none of its answers; its time does not run meanwhile,
        the one for taking a frame does."""
        began, deadline = anyio.current_time(), self._deadline.deadline
        self._deadline.deadline = math.inf
        await self._outbox.wait_taken()
        self._deadline.deadline = deadline + anyio.current_time() - began

    @property
    def _is_owed_bytes(self) -> bool:
        """The peer has begun something that it must finish: HELLO, a frame, a WRITE of several frames."""
        return (
            self._connection.state is State.START
            or self._connection.is_mid_frame
            or self._writes.is_owed_frames
        )

    async def _receive_bytes(self) -> None:
        views = self._connection.receive_buffers()
        count, descriptors = sum(map(len, views)), 0
        if self._connection.is_receiving_payload:
            try:
                await self._transport.receive_exactly(views, self._count)
            except EOFError:
                count = 0
        elif Feature.REGIONS in self._connection.features and self._local is not None:
            received = self._regions.received
            before = len(received)
            count = await self._local.receive_with_descriptors(views, received)
            descriptors = len(received) - before
        else:
            count = await self._transport.receive_some(views)
        self._connection.bytes_received(count, descriptors=descriptors)

    def _count(self, received_bytes: int) -> None:
        self._received_bytes += received_bytes

    def _give_way(self) -> None:
        """Somebody waits for memory. If it is kept here for a peer that sends little or nothing, let it go.

        Its bytes count from the first time that it was in somebody's way: until then the peer may take its
        time, as far as `frame_seconds` go.
        """
        if math.isinf(self._deadline.deadline) or not self._writes.is_holding:
            self._stalled = None
            return
        now, patience = anyio.current_time(), self._shared.patience
        if self._stalled is None:
            self._stalled = (self._received_bytes, now)
        elif now - self._stalled[1] >= patience.stall_seconds:
            least_bytes = (now - self._stalled[1]) * patience.trickle_bytes_per_second
            if self._received_bytes - self._stalled[0] >= least_bytes:
                self._stalled = (self._received_bytes, now)
                return
            self._is_in_the_way = True
            self._deadline.deadline = now

    async def _take(self, event: Event, requests: anyio.abc.TaskGroup) -> None:
        match event:
            case RequestReceived(request_id=request_id, message=Write() as message, is_final=is_final):
                await self._writes.take(request_id, message, is_final, requests)
            case RequestReceived(request_id=request_id, message=message):
                await self._take_request(request_id, message, requests)
            case PayloadExpected(request_id=request_id, message=Write() as message):
                self._connection.accept_payload(await self._writes.find_memory(request_id, message))
            case HelloReceived(hello=hello):
                self._greet(hello)
            case _:
                raise AssertionError(f"not an event of a gateway: {event}")

    def _greet(self, hello: Hello) -> None:
        tenant = self._shared.door.admit(hello.token)
        if tenant is None:
            raise RemoteProtocolError("token missing or wrong", ErrorCode.UNAUTHENTICATED)
        if not hello.min_version <= VERSION <= hello.max_version:
            raise RemoteProtocolError(f"this gateway speaks version {VERSION}", ErrorCode.UNSUPPORTED_VERSION)
        if any(extension.tag & CRITICAL_EXTENSION for extension in hello.extensions):
            raise RemoteProtocolError("a critical extension is unknown here", ErrorCode.UNSUPPORTED_VERSION)
        if hello.max_body_bytes < MIN_BODY_BYTES or 0 < hello.max_payload_bytes < MIN_PAYLOAD_BYTES:
            raise RemoteProtocolError(
                f"a client must receive bodies of {MIN_BODY_BYTES} bytes, and payloads of none or "
                f"{MIN_PAYLOAD_BYTES}",
                ErrorCode.LIMIT_EXCEEDED,
            )
        self._store.enter(tenant)
        if tenant.name:
            self._peer = self._answers.peer = f"{self._peer} ({tenant.name})"
        self._answers.max_body_bytes = hello.max_body_bytes
        self._answers.max_payload_bytes = hello.max_payload_bytes
        features = FEATURES
        if self._local is not None:
            features |= Feature.REGIONS
        welcome = Welcome(
            features=features,
            boot_id=self._shared.boot_id,
            limits=self._shared.limits,
            agent=self._shared.agent,
            extensions=self._extensions,
        )
        self._outbox.put_prompt(self._connection.accept(welcome))
        if Feature.CREDITS in self._connection.features:
            self._shared.credits.join(self._credit)
        if self._local is not None and Feature.REGIONS in self._connection.features:
            self._local.abort_only(Half.RECEIVING)  # no end that the client can see before we close
        log.debug("%s: %r", self._peer, hello.agent)

    def _credit(self, credit: Credit) -> None:
        if self._connection.state is State.OPEN:  # else it asks nothing new
            self._outbox.put_prompt(self._connection.notice(credit))

    # ------------------------------------------------------------ requests

    async def _take_request(self, request_id: int, message: Request, requests: anyio.abc.TaskGroup) -> None:
        self._meter.begin(request_id, message)
        if isinstance(message, RegionOpen):
            self._regions.keep(request_id)
        if isinstance(message, (Fence, Goodbye)):
            reply = StatusReply() if isinstance(message, Fence) else GoodbyeReply()
            self._fences.bar(lambda: self._reach(request_id, reply))
            return
        if isinstance(message, Release):
            # Not held back by a FENCE: a DELETE before it may be waiting for just this.
            self._answers.statuses(request_id, self._leases.release(message.lease_ids))
            return
        if isinstance(message, (Exist, Ping)) and self._fences.current.is_open:
            self._answer_at_once(request_id, message)
            return
        cost_bytes = message_bytes(message)
        if cost_bytes and not self._shared.admission.admit(cost_bytes):
            self._answers.refuse(request_id, message, ErrorCode.OVERLOADED)
            return
        era = self._fences.enter()
        # `start` returns when the request has begun, so that what is asked first begins first.
        await requests.start(self._work, request_id, message, era, cost_bytes)

    def _reach(self, request_id: int, reply: StatusReply | GoodbyeReply) -> None:
        """A barrier: everything before it is done. Its reply overtakes none of theirs."""
        if self._answers.is_over:
            return
        self._outbox.put_in_turn(Frame(parts=[self._answers.encode(request_id, reply)]))
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
                    await self._reads.answer(request_id, message)
                case Delete(namespace=namespace, keys=keys):
                    self._answers.statuses(request_id, await self._store.delete_many(namespace, keys))
                case Check(namespace=namespace, keys=keys):
                    self._answers.statuses(request_id, await self._store.check_many(namespace, keys))
                case ReadRegion():
                    await self._shared_transfers.read(request_id, message)
                case WriteRegion():
                    await self._shared_transfers.write(request_id, message)
                case RegionOpen():
                    self._open_region(request_id, message)
                case RegionClose(region=region):
                    code = await self._regions.close(region)
                    self._answers.prompt(request_id, StatusReply(status=code))
                case Exist() | Ping():
                    self._answer_at_once(request_id, message)
                case _:
                    raise AssertionError(f"a request that the core should have refused: {message}")
        except Exception as exc:
            if not self._answers.is_over:  # else: cancelled, but not yet told, and nobody is left to answer
                self._answers.refuse(request_id, message, self._answers.code_for(exc))
        finally:
            self._shared.admission.leave(cost_bytes)
        self._fences.leave(era)

    def _open_region(self, request_id: int, message: RegionOpen) -> None:
        code = ErrorCode.OK
        try:
            self._regions.open(request_id, message.region, message.region_bytes)
        except RegionRefused as exc:
            self._complain(logging.INFO, "region refused", f"{message.region}: {exc}")
            code = exc.code
        self._answers.prompt(request_id, StatusReply(status=code))

    def _answer_at_once(self, request_id: int, message: Exist | Ping) -> None:
        if isinstance(message, Ping):
            self._answers.prompt(request_id, Pong(nonce=message.nonce))
            return
        try:
            found = self._leases.look_up(message)
        except Exception as exc:
            self._answers.refuse(request_id, message, self._answers.code_for(exc))
            return
        step = max(1, self._answers.max_body_bytes - EXIST_HEAD_BYTES)
        for first in range(0, len(found.statuses), step):
            reply = ExistReply(
                first=first,
                statuses=found.statuses[first : first + step],
                lease_id=found.lease_id,
                lease_ms=found.lease_ms,
            )
            self._answers.prompt(request_id, reply, is_final=first + step >= len(found.statuses))

    # ------------------------------------------------------------ sending, and the end

    async def _send(self) -> None:
        """The writer. When it is done, so is the session."""
        try:
            await self._outbox.run(self._transport)
        except (OSError, EOFError) as exc:
            # Perhaps in the middle of a frame, which nobody can finish: only closing is left.
            self._complain(logging.INFO, "sending failed", str(exc) or type(exc).__name__)
            if isinstance(exc, OSError) and exc.errno == errno.EIO:
                await self._drop_unreadable()
            self._over.cancel()
        else:
            self._sent.set()
            if not self._is_at_fault:
                self._over.cancel()

    async def _drop_unreadable(self) -> None:
        """The device, not the peer, ended a frame: find out which objects it fails, so that they are misses.

        The client will ask for all of them again on another connection, and must not meet the same end there:
        so whatever was to be sent is looked at, and this connection stays up until it has been.
        """
        leases = {id(lease): lease for lease in (*self._outbox.reads, *self._reads.unframed)}
        with anyio.move_on_after(self._shared.patience.verify_seconds):
            await self._store.verify(cast(list[ReadLease], list(leases.values())))

    async def _say_why(self, violation: RemoteProtocolError) -> None:
        """Best effort, and bounded: ERROR, after the frame under way."""
        self._is_at_fault = True
        self._shared.counters.violations[violation.code.name] += 1
        self._complain(logging.WARNING, f"closed: {violation.code.name}", shown(str(violation)))
        self._outbox.finish(self._connection.error(violation.code, str(violation)))
        with anyio.move_on_after(self._shared.patience.farewell_seconds), contextlib.suppress(OSError):
            await self._sent.wait()
            # Closing with unread bytes would reset the connection, and the ERROR might be lost with it.
            waste = [memoryview(bytearray(65536))]
            while await self._transport.receive_some(waste):
                pass

    def _note_end(self, notice: Notice) -> None:
        """The client has said why it closes the connection."""
        assert isinstance(notice, ErrorMessage), f"not a notice of a client: {notice}"
        matter = f"the client ended the connection: {notice.code.name}"
        self._complain(logging.INFO, matter, shown(notice.text))

    def _complain(self, level: int, matter: str, reason: str) -> None:
        """A line that the peer can cause, as often as it likes."""
        self._shared.complaints.tell(log, level, self._peer, matter, reason, now=anyio.current_time())

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
