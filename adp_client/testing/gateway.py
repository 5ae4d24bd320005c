"""A gateway that keeps objects in a dict: the reference for what a client may expect, and a stage for faults.

    async with MemoryGateway() as gateway:
        async with Client(config, dial=gateway.dial) as client: ...

Requests are answered in the order they come unless `hold` or `script` say otherwise. `script` sees every
request first and may answer it itself: late, twice, with another id, short, or never.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self

import anyio
import anyio.abc
import anyio.lowlevel
import attrs
import xxhash

from adp_client.protocol.connection import Connection
from adp_client.protocol.constants import ErrorCode, Feature, Role
from adp_client.protocol.errors import RemoteProtocolError
from adp_client.protocol.events import HelloReceived, PayloadExpected, PeerClosed, RequestReceived
from adp_client.protocol.messages import (
    Check,
    Credit,
    Delete,
    Exist,
    ExistReply,
    Fence,
    Goodbye,
    GoodbyeReply,
    Limits,
    Ping,
    Pong,
    Read,
    ReadItem,
    ReadReply,
    Reply,
    StatusReply,
    Welcome,
    Write,
)
from adp_client.transport.base import Part, Transport
from adp_client.transport.endpoints import Endpoint
from adp_client.transport.memory import memory_pair

Script = Callable[["Session", RequestReceived], Awaitable[bool]]


@attrs.define
class StoredObject:
    """Bytes, and the checksum that their writer gave."""

    data: bytes
    checksum: int


class Session:
    """One connection, seen from the gateway."""

    def __init__(self, gateway: "MemoryGateway", transport: Transport) -> None:
        self.gateway = gateway
        self.transport = transport
        self.connection = Connection(Role.GATEWAY)
        self.requests: list[RequestReceived] = []
        self._open_writes: dict[int, list[tuple[bytes, bytearray, int]]] = {}
        self._memory: list[memoryview] = []
        self._lock = anyio.Lock()

    async def run(self) -> None:
        """Serve until either side ends it."""
        connection = self.connection
        try:
            while True:
                event = connection.next_event()
                if event is None:
                    count = await self.transport.receive_some(connection.receive_buffers())
                    connection.bytes_received(count)
                elif isinstance(event, HelloReceived):
                    await self.greet(event)
                elif isinstance(event, PayloadExpected):
                    self._memory = [memoryview(bytearray(length)) for length in event.lengths]
                    connection.accept_payload(self._memory)
                elif isinstance(event, RequestReceived):
                    await self._take(event)
                elif isinstance(event, PeerClosed):
                    return
        except RemoteProtocolError as exc:
            self.gateway.violations.append(exc)
            await self.transport.send([connection.error(exc.code, str(exc))])
        except (OSError, EOFError):
            pass  # the client has gone
        finally:
            self.transport.abort()
            with anyio.CancelScope(shield=True):
                await self.transport.aclose()

    async def greet(self, event: HelloReceived) -> None:
        """Answer HELLO: refuse a wrong token, tell the limits and the boot id."""
        gateway = self.gateway
        if gateway.token is not None and event.hello.token != gateway.token.encode():
            await self.transport.send([self.connection.error(ErrorCode.UNAUTHENTICATED, "wrong token")])
            return
        welcome = Welcome(
            features=gateway.features,
            boot_id=gateway.boot_id,
            limits=gateway.limits,
            agent="memory-gateway",
        )
        await self.transport.send([self.connection.accept(welcome)])

    async def _take(self, event: RequestReceived) -> None:
        if isinstance(event.message, Write):
            self._collect(event.request_id, event.message)
        self.requests.append(event)
        if not event.is_final:
            return
        script = self.gateway.script
        if script is None or not await script(self, event):
            await self.answer(event)

    async def answer(self, event: RequestReceived) -> None:
        """The right answer to `event`, from the gateway's objects."""
        message = event.message
        if isinstance(message, Read):
            await self.answer_read(event.request_id, message)
            return
        reply = self._reply_to(event)
        await self.send_reply(event.request_id, reply)
        if isinstance(reply, GoodbyeReply):
            self.transport.abort()

    async def send_reply(
        self, request_id: int, reply: Reply, payload: Sequence[Part] = (), *, is_final: bool = True
    ) -> None:
        """One frame of an answer, whole, whoever else is sending."""
        async with self._lock:
            raw = self.connection.reply(request_id, reply, is_final=is_final)
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
        objects = self.gateway.objects
        match event.message:
            case Exist(namespace=namespace, keys=keys):
                return ExistReply(
                    statuses=bytes((namespace, key) not in objects for key in keys)  # 0 OK, 1 NOT_FOUND
                )
            case Write():
                return StatusReply(statuses=self._store(event.request_id, event.message.namespace))
            case Delete(namespace=namespace, keys=keys):
                return StatusReply(
                    statuses=bytes(objects.pop((namespace, key), None) is None for key in keys)
                )
            case Check(namespace=namespace, keys=keys):
                return StatusReply(statuses=bytes(self._check(namespace, key) for key in keys))
            case Fence():
                return StatusReply()
            case Ping(nonce=nonce):
                return Pong(nonce=nonce)
            case Goodbye():
                return GoodbyeReply()
            case _:
                return StatusReply(status=ErrorCode.REFUSED)

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
        """Objects in frames of at most `frame_bytes`, the larger ones in several."""
        limit = self.gateway.frame_bytes
        rows: list[ReadItem] = []
        payload: list[memoryview] = []
        room = limit
        for index, (key, capacity) in enumerate(zip(message.keys, message.capacities, strict=True)):
            stored = self.gateway.objects.get((message.namespace, key))
            if stored is None:
                rows.append(ReadItem(index=index, status=ErrorCode.NOT_FOUND))
                continue
            size = len(stored.data)
            if size > capacity:
                rows.append(ReadItem(index=index, status=ErrorCode.TOO_LARGE, object_bytes=size))
                continue
            offset = 0
            while True:
                length = min(room, size - offset)
                rows.append(
                    ReadItem(
                        index=index, object_bytes=size, offset=offset, length=length, checksum=stored.checksum
                    )
                )
                payload.append(memoryview(stored.data)[offset : offset + length])
                offset, room = offset + length, room - length
                if not room:
                    is_final = index + 1 == len(message.keys) and offset == size
                    await self.send_reply(
                        request_id, ReadReply(items=tuple(rows)), payload, is_final=is_final
                    )
                    if is_final:
                        return
                    rows, payload, room = [], [], limit
                if offset == size:
                    break
        await self.send_reply(request_id, ReadReply(items=tuple(rows)), payload)


class MemoryGateway:
    """Objects by (namespace, key), and the sessions that were dialled. See the module.

    Without `fragments` it says that it does not cut, and stores nothing above `max_command_bytes`.

    `make_pair` may be replaced to serve over something else than memory, `wrap` to put faults in between.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        boot_id: bytes = bytes(16),
        token: str | None = None,
        fragments: bool = True,
        frame_bytes: int = 1 << 20,
        capacity_bytes: int = 1 << 20,
        chunk_bytes: int = 1 << 20,
    ) -> None:
        self.limits = Limits() if limits is None else limits
        self.features = Feature.CREDITS | (Feature.FRAGMENTS if fragments else Feature.NONE)
        self.boot_id = boot_id
        self.token = token
        self.frame_bytes = frame_bytes
        self.objects: dict[tuple[bytes, bytes], StoredObject] = {}
        self.sessions: list[Session] = []
        self.violations: list[RemoteProtocolError] = []
        self.script: Script | None = None
        self.make_pair: Callable[[], tuple[Transport, Transport]] = lambda: memory_pair(
            capacity_bytes=capacity_bytes, chunk_bytes=chunk_bytes
        )
        self.wrap: Callable[[Transport], Transport] = lambda transport: transport
        self.is_down = False
        self.dials = 0
        self._tasks: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._life = self._live()
        await self._life.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> bool | None:
        return await self._life.__aexit__(*exc_info)  # type: ignore[arg-type]

    @asynccontextmanager
    async def _live(self) -> AsyncGenerator[None]:
        error: Exception | None = None
        async with anyio.create_task_group() as self._tasks:
            try:
                yield
            except Exception as exc:
                error = exc
            self._tasks.cancel_scope.cancel()
        if error is not None:
            raise error

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
        session = Session(self, theirs)
        self.sessions.append(session)
        assert self._tasks is not None, "use the gateway inside `async with`"
        self._tasks.start_soon(session.run)
        return self.wrap(ours)

    def put(self, namespace: bytes, key: bytes, data: bytes, *, checksum: int | None = None) -> None:
        """Store an object without a client; another `checksum` makes it a damaged one."""
        right = xxhash.xxh3_64_intdigest(data)
        self.objects[namespace, key] = StoredObject(data, right if checksum is None else checksum)

    def cut(self) -> None:
        """Break every connection."""
        for session in self.sessions:
            session.transport.abort()

    def restart(self, boot_id: bytes) -> None:
        """Break every connection and come back as another boot."""
        self.boot_id = boot_id
        self.cut()
