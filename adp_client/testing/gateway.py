"""A gateway that keeps objects in a dict: the reference for what a client may expect, and a stage for faults.

    async with MemoryGateway() as gateway:
        async with Client(config, dial=gateway.dial) as client: ...

Requests are answered in the order they come; only a DELETE that waits for reads or leases of other
connections, and what is behind a FENCE that has not been reached, come later. `script` sees every request
when its turn has come and may answer it itself: late, twice, with another id, short, or never.

It keeps the gateway contract of `adp_client.testing.conformance`.
"""

import contextlib
import hmac
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence

import anyio
import anyio.abc
import anyio.lowlevel
import attrs
import xxhash

from adp_client.protocol.connection import Connection
from adp_client.protocol.constants import CRITICAL_EXTENSION, VERSION, ErrorCode, Feature, Role
from adp_client.protocol.errors import RemoteProtocolError
from adp_client.protocol.events import HelloReceived, NoticeReceived, PayloadExpected, RequestReceived
from adp_client.protocol.messages import (
    Check,
    Credit,
    Delete,
    Exist,
    ExistReply,
    Extension,
    Fence,
    Goodbye,
    GoodbyeReply,
    Hello,
    Limits,
    Notice,
    Ping,
    Pong,
    Read,
    ReadItem,
    ReadRegion,
    ReadRegionReply,
    ReadReply,
    RegionClose,
    RegionOpen,
    Release,
    Reply,
    StatusReply,
    Welcome,
    Write,
    WriteRegion,
)
from adp_client.protocol.state import State
from adp_client.transport.base import Part, Transport, local_transport
from adp_client.transport.endpoints import Endpoint
from adp_client.transport.memory import memory_pair

from .leases import Claim, LeaseBook
from .life import Served
from .regions import MemoryRegions, StoredObject

Script = Callable[["Session", RequestReceived], Awaitable[bool]]

ANNOUNCED = Feature.FRAGMENTS | Feature.END_TO_END | Feature.CREDITS | Feature.LEASES | Feature.REGIONS

FAREWELL_SECONDS = 1.0  # for a violator to take the ERROR that says why it is closed
_REPLY_HEAD_BYTES, _EXIST_HEAD_BYTES, _READ_ITEM_BYTES = 16, 32, 32


class Session:
    """One connection, seen from the gateway."""

    def __init__(self, gateway: "MemoryGateway", transport: Transport) -> None:
        self.gateway = gateway
        self.transport = transport
        self.connection = Connection(Role.GATEWAY)
        self.hello = Hello()
        self.requests: list[RequestReceived] = []
        self.notices: list[Notice] = []
        self._open_writes: dict[int, list[tuple[bytes, bytearray, int]]] = {}
        self._memory: list[memoryview] = []
        self.regions = MemoryRegions()
        self._local = local_transport(transport)
        self._lock = anyio.Lock()
        self._unanswered: set[int] = set()
        self._asked: deque[RequestReceived] = deque()  # whole requests whose turn has not come
        self._is_advancing = False
        self.is_over = False
        self._tasks: anyio.abc.TaskGroup | None = None

    async def run(self) -> None:
        """Serve until either side ends it."""
        async with anyio.create_task_group() as self._tasks:
            await self._serve()
            self._tasks.cancel_scope.cancel()

    def answer_later(self, event: RequestReceived, seconds: float) -> None:
        """Give the right answer to `event` after some time, while others are taken and answered."""
        assert self._tasks is not None
        self._tasks.start_soon(self._answer_later, event, seconds)

    async def _answer_later(self, event: RequestReceived, seconds: float) -> None:
        await anyio.sleep(seconds)
        if self._is_open:
            with contextlib.suppress(OSError):
                await self.answer(event)
                await self._advance()

    @property
    def _is_open(self) -> bool:
        return self.connection.state in (State.OPEN, State.DRAINING, State.LEAVING)

    async def _serve(self) -> None:
        connection = self.connection
        try:
            while True:
                event = connection.next_event()
                if event is None:
                    await self._receive()
                elif isinstance(event, HelloReceived):
                    await self.greet(event)
                elif isinstance(event, PayloadExpected):
                    self._memory = [memoryview(bytearray(length)) for length in event.lengths]
                    connection.accept_payload(self._memory)
                elif isinstance(event, RequestReceived):
                    await self._take(event)
                else:
                    if isinstance(event, NoticeReceived):
                        self.notices.append(event.notice)
                    return  # the client has gone, and perhaps said why
        except RemoteProtocolError as exc:
            self.gateway.violations.append(exc)
            await self.refuse(exc)
        except (OSError, EOFError):
            pass  # the client has gone
        finally:
            self.is_over = True
            self.gateway.leases.leave(self)
            self.regions.leave()
            self.transport.abort()
            with anyio.CancelScope(shield=True):
                await self.transport.aclose()
            self.gateway.ended.append(self)

    async def _receive(self) -> None:
        connection, views = self.connection, self.connection.receive_buffers()
        if self._local is None or connection.is_receiving_payload:
            connection.bytes_received(await self.transport.receive_some(views))
            return
        received = self.regions.received
        before = len(received)
        count = await self._local.receive_with_descriptors(views, received)
        connection.bytes_received(count, descriptors=len(received) - before)

    async def refuse(self, violation: RemoteProtocolError) -> None:
        """The last words to a client that broke the protocol, if it takes them."""
        with anyio.move_on_after(FAREWELL_SECONDS), contextlib.suppress(OSError):
            async with self._lock:
                await self.transport.send([self.connection.error(violation.code, str(violation))])

    async def greet(self, event: HelloReceived) -> None:
        """Answer HELLO: refuse what cannot be served, tell the limits and the boot id."""
        gateway, hello = self.gateway, event.hello
        if gateway.token is not None and not hmac.compare_digest(hello.token, gateway.token.encode()):
            raise RemoteProtocolError("wrong token", ErrorCode.UNAUTHENTICATED)
        if not hello.min_version <= VERSION <= hello.max_version:
            raise RemoteProtocolError(f"version {VERSION} only", ErrorCode.UNSUPPORTED_VERSION)
        if any(extension.tag & CRITICAL_EXTENSION for extension in hello.extensions):
            raise RemoteProtocolError("a critical extension is unknown", ErrorCode.UNSUPPORTED_VERSION)
        self.hello = hello
        features = gateway.features
        if self._local is None:
            features &= ~Feature.REGIONS
        welcome = Welcome(
            features=features,
            boot_id=gateway.boot_id,
            limits=gateway.limits,
            agent="memory-gateway",
            extensions=gateway.extensions,
        )
        await self.transport.send([self.connection.accept(welcome)])

    async def _take(self, event: RequestReceived) -> None:
        if isinstance(event.message, Write):
            self._collect(event.request_id, event.message)
        self.requests.append(event)
        self._unanswered.add(event.request_id)
        if event.is_final:
            self._asked.append(event)
            await self._advance()

    async def _advance(self) -> None:
        """Answer every request whose turn has come."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while (event := self._next_request()) is not None:
                script = self.gateway.script
                if script is None or not await script(self, event):
                    await self.answer(event)
        finally:
            self._is_advancing = False

    def _next_request(self) -> RequestReceived | None:
        """The next in turn. A FENCE or GOODBYE waits for all before it, and what is behind it waits too."""
        barriers = [each.request_id for each in self._asked if isinstance(each.message, (Fence, Goodbye))]
        barrier = min(barriers, default=None)
        for event in self._asked:
            number = event.request_id
            is_release = isinstance(event.message, Release)  # what is before it may wait for that very lease
            if (
                barrier is None
                or number < barrier
                or is_release
                or number == barrier == min(self._unanswered)
            ):
                self._asked.remove(event)
                return event
        return None

    async def answer(self, event: RequestReceived) -> None:
        """The right answer to `event`, from the gateway's objects."""
        message = event.message
        if isinstance(message, Read):
            await self.answer_read(event.request_id, message)
        elif isinstance(message, Delete):
            await self._delete(event.request_id, message)
        else:
            reply = self._reply_to(event)
            await self._send_statuses(event.request_id, reply)
            if isinstance(reply, GoodbyeReply):
                self.transport.abort()

    async def _delete(self, request_id: int, message: Delete) -> None:
        """What is not leased goes at once, the rest when it may; the answer waits for that, and for reads."""
        objects = self.gateway.objects
        gone: set[bytes] = set()

        def take(subject: tuple[bytes, bytes]) -> None:
            if not self.is_over and objects.pop(subject, None) is not None:
                gone.add(subject[1])

        claim = self.gateway.leases.claim([(message.namespace, key) for key in message.keys], take)
        if claim.left or self.gateway.is_read(message.namespace, message.keys):
            assert self._tasks is not None
            self._tasks.start_soon(self._finish_delete, request_id, message, claim, gone)
        else:
            await self._finish_delete(request_id, message, claim, gone)

    async def _finish_delete(self, request_id: int, message: Delete, claim: Claim, gone: set[bytes]) -> None:
        await self.gateway.leases.wait(claim)
        while self.gateway.is_read(message.namespace, message.keys):
            await self.gateway.read_ended()
        statuses = bytearray()
        for key in message.keys:
            statuses.append(ErrorCode.OK if key in gone else ErrorCode.NOT_FOUND)
            gone.discard(key)
        if self._is_open:
            with contextlib.suppress(OSError):
                await self._send_statuses(request_id, StatusReply(statuses=bytes(statuses)))
                await self._advance()

    async def _send_statuses(self, request_id: int, reply: Reply) -> None:
        """A reply other than a READ's, in as many frames as the client's limit asks for."""
        if isinstance(reply, ReadRegionReply):
            await self._send_rows(request_id, reply)
            return
        if not isinstance(reply, (StatusReply, ExistReply)):
            await self.send_reply(request_id, reply)
            return
        head_bytes = _EXIST_HEAD_BYTES if isinstance(reply, ExistReply) else _REPLY_HEAD_BYTES
        step = max(1, self.hello.max_body_bytes - head_bytes)
        count = len(reply.statuses)
        for first in range(0, max(1, count), step):
            part = attrs.evolve(reply, first=first, statuses=reply.statuses[first : first + step])
            await self.send_reply(request_id, part, is_final=first + step >= count)

    async def _send_rows(self, request_id: int, reply: ReadRegionReply) -> None:
        rows, step = list(reply.items), self._most_rows
        for first in range(0, max(1, len(rows)), step):
            part = attrs.evolve(reply, items=rows[first : first + step])
            await self.send_reply(request_id, part, is_final=first + step >= len(rows))

    async def send_reply(
        self, request_id: int, reply: Reply, payload: Sequence[Part] = (), *, is_final: bool = True
    ) -> None:
        """One frame of an answer, whole, whoever else is sending. Raises OSError if the client has gone."""
        async with self._lock:
            if self.connection.state is State.CLOSED:
                raise BrokenPipeError("the client has gone")
            raw = self.connection.reply(request_id, reply, is_final=is_final)
            if is_final:
                self._unanswered.discard(request_id)
            await self.transport.send([raw, *payload])

    async def send_goodbye(self) -> None:
        """Begin to drain this connection."""
        async with self._lock:
            await self.transport.send([self.connection.notice(Goodbye())])

    async def send_credit(self, *, requests: int, inflight_bytes: int) -> None:
        """Have the client use less, or more again, of its window."""
        async with self._lock:
            credit = Credit(requests=requests, inflight_bytes=inflight_bytes)
            await self.transport.send([self.connection.notice(credit)])

    def _reply_to(self, event: RequestReceived) -> Reply:
        match event.message:
            case Exist() as message:
                return self._look_up(message)
            case Release(lease_ids=lease_ids):
                book = self.gateway.leases
                return StatusReply(
                    statuses=bytes(
                        ErrorCode.OK if book.release(self, each) else ErrorCode.STALE_EPOCH
                        for each in lease_ids
                    )
                )
            case Write():
                return StatusReply(statuses=self._store(event.request_id, event.message.namespace))
            case Check(namespace=namespace, keys=keys):
                return StatusReply(statuses=bytes(self._check(namespace, key) for key in keys))
            case Fence():
                return StatusReply()
            case RegionOpen(region=region, region_bytes=region_bytes):
                return StatusReply(status=self.regions.open(region, region_bytes))
            case RegionClose(region=region):
                return StatusReply(status=self.regions.close(region))
            case ReadRegion():
                return ReadRegionReply(items=self.regions.read(self.gateway.objects, event.message))
            case WriteRegion():
                return StatusReply(statuses=self.regions.write(self.gateway.objects, event.message))
            case Ping(nonce=nonce):
                return Pong(nonce=nonce)
            case Goodbye():
                return GoodbyeReply()
            case _:
                return StatusReply(status=ErrorCode.REFUSED)

    def _look_up(self, message: Exist) -> ExistReply:
        gateway = self.gateway
        subjects = [(message.namespace, key) for key in message.keys]
        lease_ms = min(message.lease_ms, gateway.limits.max_lease_ms)
        found = [
            subject in gateway.objects and not (lease_ms and gateway.leases.is_claimed(subject))
            for subject in subjects
        ]
        statuses = bytes(ErrorCode.OK if each else ErrorCode.NOT_FOUND for each in found)
        if not lease_ms or not any(found):
            return ExistReply(statuses=statuses)
        held = [subject for subject, is_found in zip(subjects, found, strict=True) if is_found]
        lease_id = gateway.leases.grant(self, held, lease_ms / 1000)
        return ExistReply(statuses=statuses, lease_id=lease_id, lease_ms=lease_ms)

    def _collect(self, request_id: int, message: Write) -> None:
        rows = self._open_writes.setdefault(request_id, [])
        memory = iter(self._memory)
        for key, item in zip(message.keys, message.items, strict=True):
            data = next(memory) if self._memory else memoryview(b"")
            if item.offset:
                rows[-1][1].extend(data)
            else:
                rows.append((key, bytearray(data), item.checksum))
        self._memory = []

    def _store(self, request_id: int, namespace: bytes) -> bytes:
        statuses = bytearray()
        for key, data, checksum in self._open_writes.pop(request_id):
            if len(data) > self.gateway.largest_bytes:
                statuses.append(ErrorCode.TOO_LARGE)
                continue
            if xxhash.xxh3_64_intdigest(data) != checksum:
                statuses.append(ErrorCode.CORRUPT)
                continue
            self.gateway.objects[namespace, key] = StoredObject(bytes(data), checksum)
            statuses.append(ErrorCode.OK)
        return bytes(statuses)

    def _check(self, namespace: bytes, key: bytes) -> ErrorCode:
        stored = self.gateway.objects.get((namespace, key))
        if stored is None:
            return ErrorCode.NOT_FOUND
        if xxhash.xxh3_64_intdigest(stored.data) == stored.checksum:
            return ErrorCode.OK
        del self.gateway.objects[namespace, key]
        return ErrorCode.CORRUPT

    async def answer_read(self, request_id: int, message: Read) -> None:
        """Objects in frames of at most `frame_bytes` and what the client takes; larger ones in several."""
        names = [(message.namespace, key) for key in message.keys]
        with self.gateway.reading(names) as found:
            rows: list[ReadItem] = []
            payload: list[memoryview] = []
            room = self._frame_bytes
            for row, data in self._read_rows(message.capacities, names, found):
                if len(rows) == self._most_rows or row.length > room:
                    await self.send_reply(request_id, ReadReply(items=tuple(rows)), payload, is_final=False)
                    rows, payload, room = [], [], self._frame_bytes
                rows.append(row)
                payload.append(data)
                room -= row.length
            await self.send_reply(request_id, ReadReply(items=tuple(rows)), payload)

    @property
    def _most_rows(self) -> int:
        """Read items in one frame."""
        return max(1, (self.hello.max_body_bytes - _REPLY_HEAD_BYTES) // _READ_ITEM_BYTES)

    @property
    def _frame_bytes(self) -> int:
        return min(self.gateway.frame_bytes, self.hello.max_payload_bytes)

    def _read_rows(
        self,
        capacities: Sequence[int],
        names: Sequence[tuple[bytes, bytes]],
        found: Sequence[StoredObject | None],
    ) -> Iterator[tuple[ReadItem, memoryview]]:
        """Every row of the answer, with its bytes. Objects are cut so that frames are filled."""
        room = limit = self._frame_bytes
        nothing = memoryview(b"")
        for index, (name, capacity, stored) in enumerate(zip(names, capacities, found, strict=True)):
            if stored is None:
                yield ReadItem(index=index, status=ErrorCode.NOT_FOUND), nothing
                continue
            size = len(stored.data)
            if size > capacity or (size and not limit):
                yield ReadItem(index=index, status=ErrorCode.TOO_LARGE, object_bytes=size), nothing
                continue
            if self._verifies and xxhash.xxh3_64_intdigest(stored.data) != stored.checksum:
                self.gateway.objects.pop(name, None)
                yield ReadItem(index=index, status=ErrorCode.CORRUPT), nothing
                continue
            offset = 0
            while offset < size or not size:
                room = room or limit
                length = min(room, size - offset)
                item = ReadItem(
                    index=index, object_bytes=size, offset=offset, length=length, checksum=stored.checksum
                )
                yield item, memoryview(stored.data)[offset : offset + length]
                offset, room = offset + length, room - length
                if not size:
                    break

    @property
    def _verifies(self) -> bool:
        return self.gateway.verifies and Feature.END_TO_END not in self.connection.features


class MemoryGateway(Served):
    """Objects by (namespace, key), and the sessions that were dialled. See the module.

    Without `fragments` it says that it does not cut, and stores nothing above `max_command_bytes`.

    `session_type` may be replaced by a class of its own, to misbehave where `script` is not asked;
    `make_pair` may be replaced to serve over something else than memory, `wrap` to put faults in between.
    Without `verifies` it sends damaged objects as they are, to clients that do not ask for END_TO_END too.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        boot_id: bytes = bytes(16),
        token: str | None = None,
        fragments: bool = True,
        features: Feature = ANNOUNCED,
        verifies: bool = True,
        frame_bytes: int = 1 << 20,
        capacity_bytes: int = 1 << 20,
        chunk_bytes: int = 1 << 20,
    ) -> None:
        self.limits = Limits() if limits is None else limits
        self.boot_id = boot_id
        self.token = token
        self.features = features if fragments else features & ~Feature.FRAGMENTS
        self.extensions: tuple[Extension, ...] = ()  # of WELCOME
        self.verifies = verifies
        self.frame_bytes = frame_bytes
        self.objects: dict[tuple[bytes, bytes], StoredObject] = {}
        self.sessions: list[Session] = []
        self.ended: list[Session] = []
        self.violations: list[RemoteProtocolError] = []
        self.script: Script | None = None
        self.session_type = Session
        self.make_pair: Callable[[], tuple[Transport, Transport]] = lambda: memory_pair(
            capacity_bytes=capacity_bytes, chunk_bytes=chunk_bytes
        )
        self.wrap: Callable[[Transport], Transport] = lambda transport: transport
        self.is_down = False
        self.dials = 0
        self._tasks: anyio.abc.TaskGroup | None = None
        self.leases = LeaseBook()
        self._reads: Counter[tuple[bytes, bytes]] = Counter()
        self._read_ended = anyio.Event()

    def serve_in(self, tasks: anyio.abc.TaskGroup) -> None:
        """Instead of `async with`: have somebody else's group run the sessions."""
        self._tasks = tasks

    @property
    def largest_bytes(self) -> int:
        """The largest object that it stores."""
        limits = self.limits
        return limits.max_object_bytes if Feature.FRAGMENTS in self.features else limits.max_command_bytes

    async def dial(self, endpoint: Endpoint) -> Transport:
        """A Dialer for `Client`: a new session. Raises ConnectionRefusedError while `is_down`."""
        self.dials += 1
        await anyio.lowlevel.checkpoint()
        if self.is_down:
            raise ConnectionRefusedError(f"{endpoint} is down")
        ours, theirs = self.make_pair()
        session = self.session_type(self, theirs)
        self.sessions.append(session)
        assert self._tasks is not None, "use the gateway inside `async with`"
        self._tasks.start_soon(session.run)
        return self.wrap(ours)

    def put(self, namespace: bytes, key: bytes, data: bytes, *, checksum: int | None = None) -> None:
        """Store an object without a client; another `checksum` makes it a damaged one."""
        right = xxhash.xxh3_64_intdigest(data)
        self.objects[namespace, key] = StoredObject(data, right if checksum is None else checksum)

    @contextlib.contextmanager
    def reading(self, names: Sequence[tuple[bytes, bytes]]) -> Iterator[list[StoredObject | None]]:
        """The objects as they are now; within, whoever deletes one of them waits."""
        found = [self.objects.get(name) for name in names]
        read = [name for name, stored in zip(names, found, strict=True) if stored is not None]
        self._reads.update(read)
        try:
            yield found
        finally:
            self._reads.subtract(read)
            self._reads += Counter()  # forget the zeros
            self._read_ended.set()
            self._read_ended = anyio.Event()

    def is_read(self, namespace: bytes, keys: Sequence[bytes]) -> bool:
        """Whether any of these objects is being read."""
        return any(self._reads[namespace, key] for key in keys)

    async def read_ended(self) -> None:
        """Wait until some READ has ended."""
        await self._read_ended.wait()

    def cut(self) -> None:
        """Break every connection."""
        for session in self.sessions:
            session.transport.abort()

    def restart(self, boot_id: bytes) -> None:
        """Break every connection and come back as another boot."""
        self.boot_id = boot_id
        self.cut()
