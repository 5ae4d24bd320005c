"""A client that does one step at a time, and may break every rule: the protocol's core over a transport.

Not `adp_client.Client`, which would repeat, hide and repair what a clause wants to see.
"""

import contextlib
from collections.abc import Sequence

import attrs
import xxhash

from adp_client.protocol.codec import OPCODES
from adp_client.protocol.connection import Connection
from adp_client.protocol.constants import ErrorCode, Role
from adp_client.protocol.errors import RemoteProtocolError
from adp_client.protocol.events import Event, NoticeReceived, Opened, PayloadExpected, ReplyReceived
from adp_client.protocol.messages import (
    ErrorMessage,
    ExistReply,
    Goodbye,
    GoodbyeReply,
    Hello,
    Notice,
    Pong,
    ReadItem,
    ReadRegionReply,
    ReadReply,
    Reply,
    Request,
    StatusReply,
    Welcome,
    Write,
    WriteItem,
)
from adp_client.transport.base import Transport, local_transport

from .clause import Broken

_SCRATCH_BYTES = 65536


def checksum_of(data: bytes) -> int:
    """An object's checksum."""
    return xxhash.xxh3_64_intdigest(data)


@attrs.define
class Answer:
    """A whole reply: its frames, and what a READ brought."""

    frames: list[Reply] = attrs.field(factory=list)
    received: dict[int, bytearray] = attrs.field(factory=dict)

    @property
    def status(self) -> ErrorCode:
        """Of the request as a whole."""
        last = self.frames[-1]
        return ErrorCode.OK if isinstance(last, (Welcome, Pong, GoodbyeReply)) else last.status

    @property
    def items(self) -> dict[int, ReadItem]:
        """Of a READ, or a READ_REGION: the last row of each item."""
        rows: dict[int, ReadItem] = {}
        for frame in self.frames:
            if isinstance(frame, (ReadReply, ReadRegionReply)):
                rows |= {item.index: item for item in frame.items}
        return rows

    @property
    def statuses(self) -> list[ErrorCode]:
        """Of each item in order; raises Broken if the whole request was refused."""
        if self.status is not ErrorCode.OK:
            raise Broken(f"expected a status for each item, got a refusal: {self.status.name}")
        found: dict[int, int] = {index: item.status for index, item in self.items.items()}
        for frame in self.frames:
            if isinstance(frame, (StatusReply, ExistReply)):
                found |= dict(enumerate(frame.statuses, frame.first))
        return [ErrorCode(found[index]) for index in sorted(found)]

    def objects(self) -> list[bytes | None]:
        """Of a READ: the objects, None where there is none. Raises Broken if one is not what its row says."""
        statuses, rows = self.statuses, self.items
        found: list[bytes | None] = []
        for index, status in enumerate(statuses):
            if status is not ErrorCode.OK:
                found.append(None)
                continue
            raw = bytes(self.received.get(index, b""))
            if checksum_of(raw) != rows[index].checksum:
                raise Broken(
                    f"item {index}: expected bytes that match their checksum, got {len(raw)} that do not"
                )
            found.append(raw)
        return found


class ConnectionEnded(Exception):
    """The gateway has closed. `error`: what it said before, if it said anything."""

    def __init__(self, error: ErrorMessage | None) -> None:
        words = "without a word" if error is None else f"with {error.code.name}: {error.text}"
        super().__init__(f"the gateway closed the connection {words}")
        self.error = error


class Peer:
    """One connection to the gateway under test.

    `awaits` says what is being waited for, for the sentence about a deadline.
    """

    def __init__(self, transport: Transport, hello: Hello) -> None:
        self.transport = transport
        self.connection = Connection(Role.CLIENT)
        self.hello = hello
        self.welcome: Welcome | None = None
        self.notices: list[Notice] = []
        self.order: list[int] = []  # ids of the requests, in the order of their final replies
        self.awaits = "nothing"
        self._answers: dict[int, Answer] = {}
        self._names: dict[int, str] = {}
        self._done: set[int] = set()
        self._buffers: list[bytearray] = []

    # ------------------------------------------------------------ speaking

    async def greet(self) -> Welcome:
        """The handshake."""
        await self.send(self.connection.hello(self.hello))
        return await self.welcomed()

    async def welcomed(self) -> Welcome:
        """WELCOME, for a HELLO that has been sent."""
        self.awaits = "the answer to HELLO"
        while self.welcome is None:
            await self._event()
        self.awaits = "nothing"
        return self.welcome

    async def send(self, *parts: bytes) -> None:
        """Bytes as they are. A gateway that has closed meanwhile is noticed when it is read from."""
        self.awaits = "the gateway to take what was sent"
        with contextlib.suppress(ConnectionError):
            await self.transport.send(parts)
        self.awaits = "nothing"

    async def send_with_descriptor(self, data: bytes, descriptor: int) -> None:
        """`send`, with a descriptor on the first byte; over a transport that carries them."""
        transport = local_transport(self.transport)
        assert transport is not None
        self.awaits = "the gateway to take what was sent with a descriptor"
        with contextlib.suppress(ConnectionError):
            await transport.send_with_descriptor(data, descriptor)
        self.awaits = "nothing"

    async def ask(self, message: Request, payload: Sequence[bytes] = ()) -> int:
        """A whole request in one frame; returns its id."""
        request_id, raw = self.say(message)
        await self.send(raw, *payload)
        return request_id

    def say(
        self, message: Request, *, request_id: int | None = None, is_final: bool = True
    ) -> tuple[int, bytes]:
        """The bytes of a right request, or of another frame of one, to be sent by the caller."""
        request_id, raw = self.connection.request(message, request_id=request_id, is_final=is_final)
        self._names[request_id] = OPCODES[type(message)].name
        return request_id, raw

    @property
    def next_id(self) -> int:
        """The id of the next request, for one that is made by hand."""
        return max(self._names, default=0) + 1

    # ------------------------------------------------------------ listening

    async def answer(self, request_id: int) -> Answer:
        """The whole reply. Raises ConnectionEnded, and Broken for what the protocol does not allow."""
        while request_id not in self._done:
            self.awaits = f"the reply to {self._names[request_id]}"
            await self._event()
        self.awaits = "nothing"
        self._done.discard(request_id)
        return self._answers.pop(request_id)

    def is_answered(self, request_id: int) -> bool:
        """Whether the final reply has been received and not been asked for."""
        return request_id in self._done

    async def call(self, message: Request, payload: Sequence[bytes] = ()) -> Answer:
        """`ask` and `answer`."""
        return await self.answer(await self.ask(message, payload))

    async def ended(self) -> ErrorMessage | None:
        """Read until the gateway closes; what it said. What answers to earlier requests comes is let pass."""
        try:
            while True:
                self.awaits = "the gateway to say ERROR and to close"
                await self._event()
        except ConnectionEnded as ending:
            return ending.error

    async def listen(self) -> None:
        """Take the next thing that comes."""
        await self._event()

    async def _event(self) -> Event:
        """The next event that is not a mere request for memory."""
        while True:
            try:
                event = self.connection.next_event()
            except RemoteProtocolError as exc:
                raise Broken(
                    f"expected a gateway that keeps the protocol, got {exc.code.name}: {exc}"
                ) from exc
            if isinstance(event, PayloadExpected):
                self._buffers = [bytearray(length) for length in event.lengths]
                self.connection.accept_payload([memoryview(buffer) for buffer in self._buffers])
            elif event is None:
                await self._receive()
            else:
                self._note(event)
                return event

    async def _receive(self) -> None:
        views = self.connection.receive_buffers()
        try:
            count = await self.transport.receive_some(views)
            while self.error is not None and count:
                self.awaits = "the gateway to close after its ERROR"
                count = await self.transport.receive_some([memoryview(bytearray(_SCRATCH_BYTES))])
        except ConnectionError:
            count = 0
        if not count:
            raise ConnectionEnded(self.error)
        self.connection.bytes_received(count)

    async def first_bytes(self) -> None:
        """Wait for some bytes, and take no more than that."""
        self.awaits = "the beginning of a reply"
        await self._receive()

    @property
    def error(self) -> ErrorMessage | None:
        """What the gateway said last, if that was an ERROR."""
        last = self.notices[-1] if self.notices else None
        return last if isinstance(last, ErrorMessage) else None

    def _note(self, event: Event) -> None:
        if isinstance(event, NoticeReceived):
            self.notices.append(event.notice)
        elif isinstance(event, Opened):
            self.welcome = event.welcome
        elif isinstance(event, ReplyReceived):
            answer = self._answers.setdefault(event.request_id, Answer())
            answer.frames.append(event.message)
            if isinstance(event.message, ReadReply) and self._buffers:
                for item, buffer in zip(event.message.items, self._buffers, strict=True):
                    answer.received.setdefault(item.index, bytearray()).extend(buffer)
                self._buffers = []
            if event.is_final:
                self._done.add(event.request_id)
                self.order.append(event.request_id)

    async def leave(self) -> None:
        """GOODBYE, and its answer."""
        answer = await self.call(Goodbye())
        if not isinstance(answer.frames[-1], GoodbyeReply):
            raise Broken(f"GOODBYE: expected its reply, got {answer.frames[-1]}")

    async def pong(self, request_id: int, nonce: int) -> None:
        """The reply to a PING, which must be `nonce`."""
        (reply,) = (await self.answer(request_id)).frames
        if not isinstance(reply, Pong) or reply.nonce != nonce:
            raise Broken(f"PING {nonce}: expected the same nonce, got {reply}")


@attrs.frozen
class WriteFrame:
    """One frame of a WRITE, and the bytes behind it."""

    message: Write
    parts: tuple[bytes, ...]


def cut_write(namespace: bytes, objects: Sequence[tuple[bytes, bytes]], room: int) -> list[WriteFrame]:
    """The frames of a WRITE, each filled with `room` bytes of objects."""
    frames: list[WriteFrame] = []
    keys: list[bytes] = []
    items: list[WriteItem] = []
    parts: list[bytes] = []
    left = room

    def finish() -> None:
        message = Write(namespace=namespace, keys=tuple(keys), items=tuple(items))
        frames.append(WriteFrame(message, tuple(parts)))
        for each in (keys, items, parts):
            each.clear()

    for key, data in objects:
        offset, checksum = 0, checksum_of(data)
        while True:
            if not left:
                finish()
                left = room
            part = data[offset : offset + left]
            keys.append(key)
            items.append(
                WriteItem(object_bytes=len(data), offset=offset, length=len(part), checksum=checksum)
            )
            parts.append(part)
            offset += len(part)
            left -= len(part)
            if offset == len(data):
                break
    finish()
    return frames
