"""A client for tests: the protocol's core over a transport, one step at a time, nothing in the background."""

from collections.abc import Sequence

import attrs
import xxhash

from adp_client.protocol.connection import Connection
from adp_client.protocol.constants import ErrorCode, Feature, Role
from adp_client.protocol.events import (
    Event,
    NoticeReceived,
    Opened,
    PayloadExpected,
    PeerClosed,
    ReplyReceived,
)
from adp_client.protocol.messages import (
    ErrorMessage,
    Exist,
    Goodbye,
    Hello,
    Read,
    ReadReply,
    Reply,
    Request,
    Welcome,
    Write,
    WriteItem,
)
from adp_client.transport import Transport

NAMESPACE = bytes(range(32))
ROOM = 64 << 20


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(size: int, seed: int = 0) -> bytes:
    """`size` bytes that differ from page to page and from seed to seed."""
    stem = b"".join((seed * 1_000_003 + at).to_bytes(8, "little") for at in range(min(size, 4096) // 8 + 1))
    return (stem * (size // len(stem) + 1))[:size]


@attrs.define
class Answer:
    """A whole reply: its frames, and what a READ brought."""

    frames: list[Reply] = attrs.field(factory=list)
    objects: dict[int, bytearray] = attrs.field(factory=dict)

    @property
    def status(self) -> ErrorCode:
        return self.frames[-1].status  # type: ignore[union-attr]

    @property
    def statuses(self) -> list[int]:
        """Per item, in order; of any vector."""
        found: dict[int, int] = {}
        for frame in self.frames:
            if isinstance(frame, ReadReply):
                found |= {item.index: item.status for item in frame.items}
            else:
                found |= dict(enumerate(frame.statuses, frame.first))  # type: ignore[union-attr]
        return [found[index] for index in sorted(found)]

    def payloads(self) -> list[bytes | None]:
        """The objects by item, None where there is none; their checksums hold."""
        items = {item.index: item for frame in self.frames for item in frame.items}  # type: ignore[union-attr]
        found: list[bytes | None] = []
        for index in sorted(items):
            if items[index].status is not ErrorCode.OK:
                found.append(None)
                continue
            raw = bytes(self.objects.get(index, b""))
            assert len(raw) == items[index].object_bytes
            assert xxhash.xxh3_64_intdigest(raw) == items[index].checksum
            found.append(raw)
        return found


class Closed(Exception):
    """The gateway has closed."""


class Peer:
    def __init__(self, transport: Transport, hello: Hello | None = None) -> None:
        self.transport = transport
        self.connection = Connection(Role.CLIENT)
        self.hello = hello or Hello(features=Feature.FRAGMENTS, agent="tests")
        self.notices: list[object] = []
        self.answers: dict[int, Answer] = {}
        self.done: set[int] = set()
        self._buffers: list[bytearray] = []

    async def open(self) -> Welcome:
        await self.transport.send([self.connection.hello(self.hello)])
        while True:
            event = await self.event()
            if isinstance(event, Opened):
                return event.welcome

    async def event(self) -> Event:
        """The next event. Raises Closed when the gateway has closed."""
        while True:
            event = self.connection.next_event()
            if isinstance(event, PeerClosed):
                raise Closed
            if isinstance(event, PayloadExpected):
                self._buffers = [bytearray(length) for length in event.lengths]
                self.connection.accept_payload([memoryview(buffer) for buffer in self._buffers])
                continue
            if isinstance(event, NoticeReceived):
                self.notices.append(event.notice)
            if event is not None:
                if isinstance(event, ReplyReceived):
                    self._keep(event)
                return event
            try:
                count = await self.transport.receive_some(self.connection.receive_buffers())
            except ConnectionError:
                raise Closed from None
            self.connection.bytes_received(count)

    def _keep(self, event: ReplyReceived) -> None:
        answer = self.answers.setdefault(event.request_id, Answer())
        answer.frames.append(event.message)
        if isinstance(event.message, ReadReply) and self._buffers:
            for item, buffer in zip(event.message.items, self._buffers, strict=True):
                if item.status is ErrorCode.OK:
                    answer.objects.setdefault(item.index, bytearray()).extend(buffer)
            self._buffers = []
        if event.is_final:
            self.done.add(event.request_id)

    async def ask(self, message: Request, payload: Sequence[bytes] = ()) -> int:
        """Send one whole request of one frame; returns its id."""
        request_id, raw = self.connection.request(message)
        await self.transport.send([raw, *payload])
        return request_id

    async def answer(self, request_id: int) -> Answer:
        while request_id not in self.done:
            await self.event()
        self.done.discard(request_id)
        return self.answers.pop(request_id)

    async def call(self, message: Request, payload: Sequence[bytes] = ()) -> Answer:
        return await self.answer(await self.ask(message, payload))

    async def closed(self) -> list[object]:
        """Read until the gateway closes, or says that it does and why; the notices that came."""
        try:
            while not (self.notices and isinstance(self.notices[-1], ErrorMessage)):
                await self.event()
            await self.transport.aclose()
            return self.notices
        except Closed:
            return self.notices

    # ---------------------------------------------------------------- verbs

    async def exist(self, *keys: bytes) -> list[int]:
        return (await self.call(Exist(namespace=NAMESPACE, keys=keys))).statuses

    async def read(self, *keys: bytes, room: int = ROOM) -> list[bytes | None]:
        capacities = (room // len(keys),) * len(keys)
        answer = await self.call(Read(namespace=NAMESPACE, keys=keys, capacities=capacities))
        return answer.payloads()

    async def write(self, objects: dict[bytes, bytes]) -> list[int]:
        """In as many frames as the gateway's payload limit asks for."""
        return (await self.answer(await self.ask_write(objects))).statuses

    async def ask_write(self, objects: dict[bytes, bytes], *, frames: int | None = None) -> int:
        """Send a WRITE, or only the first `frames` frames of it."""
        request_id: int | None = None
        cut = list(cut_write(objects, self.connection.limits.max_payload_bytes))
        for number, (keys, items, parts) in enumerate(cut[:frames], 1):
            message = Write(namespace=NAMESPACE, keys=keys, items=items)
            request_id, raw = self.connection.request(
                message, request_id=request_id, is_final=number == len(cut)
            )
            await self.transport.send([raw, *parts])
        assert request_id is not None
        return request_id

    async def leave(self) -> None:
        await self.call(Goodbye())


def cut_write(
    objects: dict[bytes, bytes], max_payload_bytes: int
) -> list[tuple[tuple[bytes, ...], tuple[WriteItem, ...], list[bytes]]]:
    """The frames of a WRITE, each filled to the last byte."""
    frames = []
    keys: list[bytes] = []
    items: list[WriteItem] = []
    parts: list[bytes] = []
    room = max_payload_bytes
    for key, data in objects.items():
        checksum = xxhash.xxh3_64_intdigest(data)
        offset = 0
        while True:
            if not room:
                frames.append((tuple(keys), tuple(items), parts))
                keys, items, parts, room = [], [], [], max_payload_bytes
            part = data[offset : offset + room]
            keys.append(key)
            items.append(
                WriteItem(object_bytes=len(data), offset=offset, length=len(part), checksum=checksum)
            )
            parts.append(part)
            offset += len(part)
            room -= len(part)
            if offset == len(data):
                break
    return [*frames, (tuple(keys), tuple(items), parts)]
