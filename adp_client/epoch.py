"""One incarnation of a link: a connection from its handshake to its end.

    reader   the only task that receives; tells operations of their results
    writer   the only task that sends; takes requests from the queues as the window allows
    clock    sleeps until a deadline passes or the peer has been silent for too long

Callers own none of these. A caller that is cancelled never reaches the socket: its requests are withdrawn if
unsent, or their answers drained. Only if a transfer is inside its memory right now does it wait, within
`release_seconds`, for that one frame. So does a caller that has its answer: the answer to a WRITE may come
before the task that sent it has let go of the memory.

Trouble ends the epoch: `end` notes the reason, aborts the socket (nothing is drained: the peer may be gone)
and cancels the three tasks. Their task group therefore only ever raises bugs. When they have left, every
request that is still open is told LOST (or EXPIRED), so nobody waits for an epoch that is over. Reads into
shared regions are told last: once the gateway has closed its end, which is how it says that it does not write
there any more, or not within `release_seconds`, and then the regions are retired.
"""

import contextlib
from collections import deque
from collections.abc import Iterable

import anyio
import attrs

from .config import Timeouts
from .fragments import Way
from .landing import Landing
from .leases import Handback, Handbacks
from .operations import Operation, ReadOperation
from .pending import Outcome, Pending
from .protocol.connection import Connection
from .protocol.constants import ErrorCode, Feature, Opcode
from .protocol.errors import LinkRefused, LocalProtocolError, RemoteProtocolError
from .protocol.events import (
    Event,
    NoticeReceived,
    PayloadExpected,
    PeerClosed,
    ReplyReceived,
    RequestExpired,
)
from .protocol.messages import (
    Credit,
    ErrorMessage,
    ExistReply,
    Goodbye,
    GoodbyeReply,
    Notice,
    Ping,
    ReadRegionReply,
    ReadReply,
    Release,
    Reply,
    StatusReply,
    WriteRegion,
)
from .protocol.state import State
from .sharing import RegionOperation, Registrations
from .stats import ClientStats
from .transport.base import Half, Part, Transport, local_transport

RECEIVE_BYTES = 64 << 20

LAST_WORDS_SECONDS = 0.5  # from a failed send to the end, if the reader finds none before; for ours, too

MAX_PASSED_OVER = 8  # requests that may overtake the oldest write; then it is next, whatever its size

_FIRST = (Opcode.EXIST, Opcode.READ, Opcode.CHECK, Opcode.PING, Opcode.REGION_OPEN)
#: What shared regions need of a gateway. One that leaves fragments to us gets them as ordinary memory.
_SHARES = Feature.REGIONS | Feature.FRAGMENTS


@attrs.frozen
class Ending:
    """Why an epoch is over. `error` is what the peer or the system said, if anybody did."""

    reason: str
    error: Exception | None = None


class Epoch:
    """See the module. Made by the link after the handshake; `run` once."""

    def __init__(
        self,
        number: int,
        transport: Transport,
        connection: Connection,
        *,
        boot_id: bytes,
        timeouts: Timeouts,
        stats: ClientStats,
    ) -> None:
        self.number = number
        self.limits = connection.limits
        self.way = Way.of(connection.features, connection.limits, boot_id)
        self.features = connection.features
        self.is_open = True
        self.has_exchanged = False
        self.ending: Ending | None = None
        self._transport = transport
        self._connection = connection
        self._timeouts = timeouts
        self._stats = stats
        self._scope: anyio.CancelScope | None = None
        self._requests: dict[int, Pending] = {}
        self._expired: set[int] = set()
        self._first: deque[Pending] = deque()  # lookups and reads: somebody waits for a token
        self._later: deque[Pending] = deque()  # writes, deletes, fences: in order among themselves
        self._passed_over = 0  # how many have overtaken the head of `_later`
        self._handbacks = Handbacks()
        self._fences = 0  # in `_later`; while there is one, everything goes behind it
        self._ping_id: int | None = None
        self._wants_ping = False
        self._goodbye: Goodbye | None = None
        self._violation: RemoteProtocolError | None = None  # by the gateway; it is told, and that is all
        self._has_spoken = anyio.Event()
        self._work = anyio.Event()
        self._time = anyio.Event()
        self._memory = anyio.Event()
        self._sleeps_until = float("inf")
        self._heard_at = anyio.current_time()
        self._landing: Operation | None = None
        self._sending: Operation | None = None
        self._local = local_transport(transport) if connection.features & _SHARES == _SHARES else None
        self._registrations = Registrations(connection.limits, self._submit_own)

    @property
    def open_count(self) -> int:
        """Requests that are queued or unanswered."""
        return len(self._requests) + len(self._first) + len(self._later)

    # ------------------------------------------------------------ what callers do

    def submit(self, pending: Pending) -> None:
        """Queue a request. Never waits; the outcome is told to its operation, always."""
        pending.operation.pending_count += 1
        if not self.is_open:
            pending.finish(Outcome.LOST)
            return
        is_first = pending.operation.verb in _FIRST and not self._fences
        (self._first if is_first else self._later).append(pending)
        self._fences += pending.operation.verb is Opcode.FENCE
        self._work.set()
        self._wake_clock(pending.deadline)

    def _submit_own(self, pending: Pending) -> None:
        pending.deadline = anyio.current_time() + self._timeouts.request_seconds
        self.submit(pending)

    async def share(self, operation: RegionOperation, deadline: float) -> None:
        """Tell the gateway of the operation's regions, if it can use them and does not know them yet.

        Raises RequestTimeout at `deadline`, LocalProtocolError if a region must not be used any more.
        """
        for region in operation.regions:
            if region.is_retired:
                region.check_usable()
        operation.numbers = None
        if self._local is not None:
            operation.numbers = await self._registrations.numbers(operation.regions, deadline)

    def release(self, lease_ids: Iterable[int]) -> Handback:
        """Give leases of this epoch back. Never waits; they go before all else that waits to be sent."""
        handback = self._handbacks.add(lease_ids)
        if self.ending is not None:
            self._handbacks.drop()
        self._work.set()
        return handback

    async def abandon(self, operation: Operation) -> None:
        """The caller leaves: forget what is unsent, drain what will be answered, and return once nobody
        touches the operation's memory. Shielded; the wait for a transfer has a limit."""
        operation.is_abandoned = True
        for queue in (self._first, self._later):
            for pending in [pending for pending in queue if pending.operation is operation]:
                self._drop(queue, pending)
                pending.finish(Outcome.WITHDRAWN)
        with anyio.move_on_after(self._timeouts.release_seconds, shield=True):
            await self._untouched(operation)
            return
        self.end("a cancelled transfer did not finish in time")
        with anyio.CancelScope(shield=True):
            await self._untouched(operation)

    async def let_go(self, operation: Operation) -> None:
        """The caller has its answer: return once its memory is let go of. Bounded, as `abandon` is."""
        if operation not in (self._landing, self._sending):
            return
        with anyio.move_on_after(self._timeouts.release_seconds):
            await self._untouched(operation)
            return
        self.end("a transfer that has been answered did not finish in time")
        await self._untouched(operation)

    async def _untouched(self, operation: Operation) -> None:
        while operation in (self._landing, self._sending) or any(
            pending.operation is operation and pending.written_regions for pending in self._requests.values()
        ):
            await self._memory.wait()

    def say_goodbye(self) -> None:
        """No more requests from here; the epoch ends when everything has been answered."""
        self._leave(Goodbye())

    def end(self, reason: str, error: Exception | None = None) -> None:
        """Stop now. Never waits; the first reason stays."""
        if self.ending is not None:
            return
        self.ending = Ending(reason, error)
        self.is_open = False
        self._transport.abort()
        if self._scope is not None:
            self._scope.cancel()

    # ------------------------------------------------------------ what the link does

    async def run(self) -> None:
        """Live until `end`. Afterwards every request has an outcome and the transport is closed."""
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                if self.ending is not None:
                    self._scope.cancel()
                tasks.start_soon(self._read)
                tasks.start_soon(self._write)
                tasks.start_soon(self._keep_time)
        finally:
            self.end("closed")
            self._registrations.end()
            self._settle(are_regions_free=False)
            # Only now have the reader and the writer, and the exceptions that ended them, let go.
            self._landing = self._sending = None
            self._connection.drop_targets()
            self._tell_memory()
            with anyio.CancelScope(shield=True):
                await self._free_regions()
                self._settle(are_regions_free=True)
                await self._transport.aclose()

    async def _free_regions(self) -> None:
        """Wait until the gateway cannot write to this process's memory any more, or retire that memory."""
        regions = {region for pending in self._requests.values() for region in pending.written_regions}
        if not regions or self._local is None:
            return
        with anyio.move_on_after(self._timeouts.release_seconds) as scope:
            await self._local.wait_peer_closed()
        if scope.cancelled_caught:
            for region in regions:
                region.retire()

    def _settle(self, *, are_regions_free: bool) -> None:
        for pending in (*self._first, *self._later):
            pending.finish(Outcome.LOST)
        self._first.clear()
        self._later.clear()
        for request_id, pending in list(self._requests.items()):
            if are_regions_free or not pending.written_regions:
                del self._requests[request_id]
                pending.finish(Outcome.EXPIRED if request_id in self._expired else Outcome.LOST)
        self._tell_memory()
        self._handbacks.drop()

    # ------------------------------------------------------------ reader

    async def _read(self) -> None:
        try:
            while self.ending is None:
                event = self._connection.next_event()
                if event is None:
                    count = await self._transport.receive_some(self._connection.receive_buffers())
                    self._heard(count)
                elif isinstance(event, PayloadExpected):
                    await self._receive_payload(event)
                else:
                    self._handle(event)
        except RemoteProtocolError as exc:
            _forget_frames(exc)
            await self._complain(exc)
            self.end(f"the gateway broke the protocol: {exc}", exc)
        except (OSError, EOFError) as exc:
            _forget_frames(exc)
            self.end(f"connection lost: {exc}", exc)

    async def _complain(self, violation: RemoteProtocolError) -> None:
        """Have the writer say why this side closes, if it gets to it soon."""
        self.is_open = False
        self._violation = violation
        self._work.set()
        with anyio.move_on_after(LAST_WORDS_SECONDS):
            await self._has_spoken.wait()

    def _heard(self, count: int) -> None:
        self._heard_at = anyio.current_time()
        self._connection.bytes_received(count)

    async def _receive_payload(self, event: PayloadExpected) -> None:
        """Straight into the caller's memory, or to nowhere if the caller has left."""
        pending = self._requests[event.request_id]
        operation, reply = pending.operation, event.message
        if operation.is_abandoned:
            self._connection.accept_payload([None] * len(event.lengths))
            await self._receive_rest(None)
            return
        assert isinstance(operation, ReadOperation)
        assert isinstance(reply, ReadReply)
        self._landing = operation  # if this fails, until the epoch is over
        targets, landing = operation.landing(pending, reply.items)
        try:
            self._connection.accept_payload(targets)
            await self._receive_rest(landing)
        finally:
            operation.landed(pending, landing)
            landing.let_go()
            targets.clear()
        self._landing = None
        self._tell_memory()
        self._stats.bytes_read += sum(event.lengths)

    async def _receive_rest(self, landing: Landing | None) -> None:
        """What has come together with the frame's head is there already; receive the rest of the payload."""
        left = self._connection.payload_bytes_left
        if landing is not None:
            landing.progress(landing.total_bytes - left)
        while left:
            views = self._connection.receive_buffers()
            try:
                await self._transport.receive_exactly(views, None if landing is None else landing.progress)
            except BaseException:
                views.clear()  # the traceback may live on, and with it every frame that has this list
                raise
            self._heard(sum(map(len, views)))
            left = self._connection.payload_bytes_left

    def _handle(self, event: Event) -> None:
        match event:
            case ReplyReceived():
                self._take_reply(event)
            case NoticeReceived():
                self._take_notice(event.notice)
            case RequestExpired():
                self._expire(event.request_id)
            case PeerClosed():
                self.end("the gateway closed the connection")
            case _:
                raise AssertionError(f"not an event of a client: {event!r}")

    def _take_reply(self, event: ReplyReceived) -> None:
        if isinstance(event.message, GoodbyeReply):
            self.end("goodbye")
            return
        if event.is_final:
            self.has_exchanged = True
            self._work.set()  # the window has room
        if event.request_id == self._ping_id:
            self._ping_id = None
            self._time.set()
            return
        if self._handbacks.is_answered(event.request_id):
            return
        pending = self._requests[event.request_id]
        operation = pending.operation
        if isinstance(event.message, ExistReply) and event.message.lease_id:
            self._note_lease(pending, event.message)
        if not operation.is_abandoned:
            self._note(pending, event.message)
        if event.is_final:
            del self._requests[event.request_id]
            self._stats.replies += 1
            self._stats.replies_abandoned += operation.is_abandoned
            if operation.is_abandoned and pending.lease_ids:
                self.release(pending.lease_ids)  # nobody else is there to do it
                pending.lease_ids = set()
            pending.finish(Outcome.ANSWERED if pending.code is ErrorCode.OK else Outcome.REFUSED)
            if pending.written_regions:
                self._tell_memory()

    def _note_lease(self, pending: Pending, reply: ExistReply) -> None:
        before = len(pending.lease_ids)
        pending.lease_ids.add(reply.lease_id)
        pending.lease_ms = min(reply.lease_ms, pending.lease_ms) if before else reply.lease_ms
        self._stats.leases_granted += len(pending.lease_ids) - before

    def _note(self, pending: Pending, reply: Reply) -> None:
        if isinstance(reply, (StatusReply, ExistReply, ReadReply, ReadRegionReply)) and reply.status:
            pending.code = reply.status
            pending.retry_after_ms = reply.retry_after_ms
            return
        if isinstance(reply, ReadReply):
            assert isinstance(pending.operation, ReadOperation)
            pending.operation.note(pending, reply.items)  # all others have landed with their payload
            return
        if isinstance(reply, ReadRegionReply):
            self._stats.bytes_read += sum(row.length for row in reply.items)
        pending.operation.take(pending, reply)

    def _take_notice(self, notice: Notice) -> None:
        match notice:
            case Credit():
                self._work.set()
            case Goodbye():  # it drains: what was sent is answered, the rest goes to the next epoch
                self._leave(Goodbye())
                for pending in (*self._first, *self._later):
                    pending.finish(Outcome.LOST)
                self._first.clear()
                self._later.clear()
            case ErrorMessage():
                refusal = LinkRefused(notice.code, notice.text)
                self.end(str(refusal), refusal)

    def _expire(self, request_id: int) -> None:
        self._stats.timeouts += 1
        self._expired.add(request_id)
        pending = self._requests.get(request_id)
        what = "a ping, release or goodbye" if pending is None else pending.operation.verb.name
        self.end(f"no answer to {what} in time")

    # ------------------------------------------------------------ writer

    async def _write(self) -> None:
        try:
            while self.ending is None:
                if self._violation is not None:
                    await self._send_error(self._violation)
                    return
                has_room = self._connection.fits(0)
                if self._wants_ping and has_room:
                    await self._send_ping()
                elif self._handbacks and has_room:
                    await self._send_release()
                elif (pending := self._next_request()) is not None:
                    await self._send(pending)
                elif self._goodbye is not None and not self.open_count and has_room:
                    await self._send_goodbye(self._goodbye)
                else:
                    self._work = anyio.Event()
                    await self._work.wait()
        except OSError as exc:
            _forget_frames(exc)
            self._has_spoken.set()  # it cannot any more
            # The gateway may have said why before it closed: let the reader come to it.
            with anyio.move_on_after(LAST_WORDS_SECONDS):
                await anyio.sleep_forever()
            self.end(f"connection lost: {exc}", exc)

    def _next_request(self) -> Pending | None:
        """What may go now. Lookups and reads go first, but only so many times in a row: reads that always
        want more than the window would keep a write waiting for ever. What does not fit waits for room, and
        nothing slips past it."""
        while (queue := self._next_queue()) is not None:
            pending = queue[0]
            if pending.deadline <= anyio.current_time():
                self._expire_unsent(queue, pending)
                continue
            if self._connection.in_flight and not self._connection.fits(pending.cost_bytes):
                return None  # with nothing in flight no room will come: let the core say what is wrong
            self._drop(queue, pending)
            self._passed_over = self._passed_over + 1 if queue is self._first and self._later else 0
            return pending
        return None

    def _next_queue(self) -> deque[Pending] | None:
        if not self._later:
            return self._first or None
        # A fence lets everything pass that was asked before it; what is asked after it is behind it.
        is_due = self._passed_over >= MAX_PASSED_OVER and self._later[0].operation.verb is not Opcode.FENCE
        return self._later if is_due or not self._first else self._first

    def _drop(self, queue: deque[Pending], pending: Pending) -> None:
        queue.remove(pending)
        self._fences -= pending.operation.verb is Opcode.FENCE

    async def _send(self, pending: Pending) -> None:
        """Begin and finish one request: all of its frames, whatever its caller does meanwhile."""
        request_id: int | None = None
        last = len(pending.frames) - 1
        self._sending = pending.operation  # if this fails, until the epoch is over
        try:
            for position, frame in enumerate(pending.frames):
                request_id, raw = self._connection.request(
                    frame.message, request_id=request_id, is_final=position == last, deadline=pending.deadline
                )
                if not pending.was_sent:
                    self._requests[request_id] = pending
                    pending.was_sent = True
                    pending.sent_at = anyio.current_time()
                    self._stats.requests += 1
                    self._wake_clock(pending.deadline)
                parts: list[Part] = [raw, *frame.payload]
                is_shared = isinstance(frame.message, WriteRegion)
                payload_bytes = pending.cost_bytes if is_shared else sum(map(len, frame.payload))
                descriptor = frame.descriptor
                del frame
                if descriptor is None:
                    await self._send_parts(parts)
                else:
                    assert self._local is not None
                    self._local.abort_only(Half.SENDING)  # from now on we may have to see the gateway close
                    await self._local.send_with_descriptor(raw, descriptor)
                self._stats.bytes_written += payload_bytes
        except LocalProtocolError as exc:
            if pending.was_sent:
                return  # between two frames the gateway ended the connection; the reader deals with that
            pending.error = exc
            pending.finish(Outcome.UNSAYABLE)
        pending.frames = ()
        self._sending = None
        self._tell_memory()

    async def _send_parts(self, parts: list[Part]) -> None:
        try:
            await self._transport.send(parts)
        except BaseException:
            parts.clear()  # as in `_receive_rest`
            raise

    async def _send_error(self, violation: RemoteProtocolError) -> None:
        with contextlib.suppress(LocalProtocolError):  # above the limits that it has told: so be it
            await self._transport.send([self._connection.error(violation.code, str(violation))])
        self._has_spoken.set()

    async def _send_ping(self) -> None:
        self._wants_ping = False
        deadline = anyio.current_time() + self._timeouts.idle_ping_seconds
        self._ping_id, raw = self._connection.request(Ping(nonce=self.number), deadline=deadline)
        self._wake_clock(deadline)
        await self._transport.send([raw])

    async def _send_release(self) -> None:
        if self._connection.state is not State.OPEN:  # it drains: no more requests, and soon no more leases
            self._handbacks.drop()
            return
        lease_ids = self._handbacks.next_ids(self.limits)
        deadline = anyio.current_time() + self._timeouts.request_seconds
        request_id, raw = self._connection.request(Release(lease_ids=lease_ids), deadline=deadline)
        self._handbacks.sent(request_id, len(lease_ids))
        self._stats.leases_released += len(lease_ids)
        self._wake_clock(deadline)
        await self._transport.send([raw])

    async def _send_goodbye(self, goodbye: Goodbye) -> None:
        self._goodbye = None
        deadline = anyio.current_time() + self._timeouts.goodbye_seconds
        _, raw = self._connection.request(goodbye, deadline=deadline)
        self._wake_clock(deadline)
        await self._transport.send([raw])

    def _leave(self, goodbye: Goodbye) -> None:
        if self.is_open:
            self.is_open = False
            self._goodbye = goodbye
            self._work.set()

    def _tell_memory(self) -> None:
        self._memory.set()
        self._memory = anyio.Event()

    # ------------------------------------------------------------ clock

    async def _keep_time(self) -> None:
        while self.ending is None:
            now = anyio.current_time()
            self._connection.handle_timeout(now)
            while (event := self._connection.next_event()) is not None:
                self._handle(event)  # only RequestExpired: the reader takes all others as they come in
            self._expire_queued(now)
            self._ping_if_silent(now)
            self._sleeps_until = self._next_time()
            self._time = anyio.Event()
            with anyio.CancelScope(deadline=self._sleeps_until):
                await self._time.wait()

    def _wake_clock(self, deadline: float) -> None:
        if deadline < self._sleeps_until:
            self._time.set()

    def _next_time(self) -> float:
        times = [pending.deadline for pending in (*self._first, *self._later)]
        deadline = self._connection.next_deadline()
        if deadline is not None:
            times.append(deadline)
        if self._ping_id is None and not self._wants_ping:
            times.append(self._heard_at + self._timeouts.idle_ping_seconds)
        return min(times, default=float("inf"))

    def _expire_queued(self, now: float) -> None:
        """A request that waited for room until its deadline: the link is not to blame."""
        for queue in (self._first, self._later):
            for pending in [pending for pending in queue if pending.deadline <= now]:
                self._expire_unsent(queue, pending)

    def _expire_unsent(self, queue: deque[Pending], pending: Pending) -> None:
        self._drop(queue, pending)
        self._stats.timeouts += 1
        pending.finish(Outcome.EXPIRED)
        self._work.set()  # what was behind it may fit

    def _ping_if_silent(self, now: float) -> None:
        # The same sum as in `_next_time`: a difference may round to just below, and the clock would spin.
        if now >= self._heard_at + self._timeouts.idle_ping_seconds and self._ping_id is None:
            self._wants_ping = True
            self._work.set()


def _forget_frames(exc: BaseException) -> None:
    """`exc` outlives its epoch, and through its traceback would keep what was being sent and filled."""
    link: BaseException | None = exc
    while link is not None:
        link.__traceback__ = None
        link = link.__context__
