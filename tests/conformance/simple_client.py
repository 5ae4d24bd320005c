"""A client that does one thing at a time and shares no code with the project's. Wrong on demand.

Each of `FAULTS` takes one of its checks away, or one of its manners.
"""

import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import attrs
import xxhash

from adp_client.protocol.codec import OPCODES, decode_body, encode_body
from adp_client.protocol.constants import CRITICAL_EXTENSION, ErrorCode, Feature, Flag, Opcode
from adp_client.protocol.errors import LocalProtocolError
from adp_client.protocol.frames import FrameHeader, decode_header
from adp_client.protocol.messages import (
    Check,
    Delete,
    ErrorMessage,
    Exist,
    ExistReply,
    Fence,
    Goodbye,
    Hello,
    Ping,
    Read,
    ReadReply,
    StatusReply,
    Welcome,
    Write,
    WriteItem,
)
from adp_client.testing.conformance import Dial, RunClient
from adp_client.testing.conformance.frames import frame
from adp_client.transport import Transport

OFFERED = Feature.END_TO_END | Feature.CREDITS
EXIST_SECONDS = 0.5

#: clause id -> what the client lacks, or does, that the clause must find
FAULTS: dict[str, tuple[str, ...]] = {
    "4.1-nothing-before-welcome": ("early",),
    "4.2-version-not-offered": ("any version",),
    "4.4-feature-not-offered": ("any feature",),
    "4.4-extension-skipped": ("no extension",),
    "4.4-extension-critical": ("any extension", "leaves wordless"),
    "4.3-limits": ("no limits",),
    "4.3-new-boot": ("remembers",),
    "3.3-ids": ("one id", "ids from 5"),
    "7.4-window": ("no window",),
    "5.12-credit": ("no credit",),
    "5.2-parts": ("as they come",),
    "5.2-twice": ("last word",),
    "5.2-short": ("fills up",),
    "3.3-unknown-id": ("any id",),
    "3.3-answered-again": ("any id",),
    "3.3-another-verb": ("any verb",),
    "3.1-checksums": ("no checksums",),
    "3.1-garbage": ("garbage is fine",),
    "5.2-overloaded": ("refusals are fine", "hangs up"),
    "5.3-deadline": ("waits for ever", "keeps the line"),
    "5.5-write": ("pads", "writes halves"),
    "5.4-any-order": ("pieces as they come",),
    "5.4-misses": ("misses are empty",),
    "5.4-wrong-checksum": ("trusts",),
    "5.4-check": ("tells nobody",),
    "5.4-above-capacity": ("any size",),
    "5.4-does-not-continue": ("any offset",),
    "5.4-ended-item": ("keeps pieces",),
    "5.4-cut": ("keeps pieces",),
    "7.5-delete-once": ("repeats", "shrugs"),
    "7.5-fence-once": ("repeats", "shrugs"),
    "5.11-drain": ("stays",),
    "5.11-goodbye": ("just goes",),
}


class Violation(Exception):
    """The gateway broke the protocol."""


class Lost(Exception):
    """The connection has ended."""


@attrs.define
class Line:
    """One connection."""

    transport: Transport
    welcome: Welcome
    last_id: int
    is_draining: bool = False


class SimpleClient:
    def __init__(self, dial: Dial, fault: str = "") -> None:
        self._dial = dial
        self._fault = fault
        self._line: Line | None = None
        self._turn = anyio.Lock()
        self._known: set[bytes] = set()
        self._pieces: dict[int, bytearray] = {}

    # ------------------------------------------------------------ verbs

    async def exist(self, namespace: bytes, keys: Sequence[bytes]) -> Sequence[int]:
        async with self._turn:
            if self._fault == "remembers" and self._known.issuperset(keys):
                return bytes(len(keys))
            if self._fault == "no credit" and self._line is not None:
                await self._send(await self._connected(), Ping())
            scope = anyio.CancelScope(deadline=anyio.current_time() + EXIST_SECONDS)
            if self._fault == "waits for ever":
                scope.deadline = float("inf")
            with scope:
                statuses = await self._vector(lambda some: Exist(namespace=namespace, keys=some), keys)
                self._known |= {key for key, status in zip(keys, statuses, strict=True) if not status}
                return statuses
            if self._fault != "keeps the line":
                await self._hang_up()
            raise TimeoutError

    async def read(
        self, namespace: bytes, keys: Sequence[bytes], capacities: Sequence[int]
    ) -> Sequence[bytes | None]:
        async with self._turn:
            limits = (await self._connected()).welcome.limits
            most = min(limits.max_inflight_bytes // max(capacities), limits.max_items)
            if self._fault in ("no limits", "no window"):
                most, capacities = len(keys), [capacity * 10 for capacity in capacities]
            found: list[bytes | None] = []
            for at in range(0, len(keys), most):
                some = slice(at, at + most)
                found += await self._read(namespace, tuple(keys[some]), tuple(capacities[some]))
        return found

    async def write(self, namespace: bytes, keys: Sequence[bytes], objects: Sequence[bytes]) -> Sequence[int]:
        statuses = bytearray()
        async with self._turn:
            for key, data in zip(keys, objects, strict=True):
                if self._fault == "pads":
                    data += b"\0"
                if self._fault == "writes halves":
                    data = data[: len(data) // 2]
                statuses += await self._retrying(
                    lambda line, key=key, data=data: self._write(line, namespace, key, data)
                )
        return statuses

    async def delete(self, namespace: bytes, keys: Sequence[bytes]) -> Sequence[int]:
        async with self._turn:
            return await self._vector(
                lambda some: Delete(namespace=namespace, keys=some), keys, may_repeat=False
            )

    async def fence(self) -> None:
        async with self._turn:
            await self._retrying(lambda line: self._statuses(line, Fence(), 0), may_repeat=False)

    async def leave(self) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        if self._fault != "just goes":
            with suppress(Lost, Violation):
                await self._say_goodbye(line)
        await line.transport.aclose()

    # ------------------------------------------------------------ one request

    async def _vector(
        self, make: Callable[[tuple[bytes, ...]], Any], keys: Sequence[bytes], *, may_repeat: bool = True
    ) -> bytes:
        line = await self._connected()
        limits = line.welcome.limits
        step = min(limits.max_items, (limits.max_body_bytes - 48) // len(keys[0]))
        if self._fault == "no limits":
            step = len(keys)
        statuses = b""
        for at in range(0, len(keys), step):
            some = tuple(keys[at : at + step])
            statuses += await self._retrying(
                lambda line, some=some: self._statuses(line, make(some), len(some)), may_repeat=may_repeat
            )
        return statuses

    async def _retrying(self, run: Callable[[Line], Awaitable[Any]], *, may_repeat: bool = True) -> Any:
        for is_last in (False, True):
            line = await self._connected()
            try:
                result = await run(line)
            except Lost:
                await self._hang_up()
                if self._fault == "shrugs":
                    return bytes(1)
                if is_last or not (may_repeat or self._fault == "repeats"):
                    raise
                continue
            except (Violation, LocalProtocolError):
                await self._hang_up()
                raise Violation from None
            if line.is_draining and self._fault != "stays":
                await self.leave()
            return result
        raise AssertionError

    async def _statuses(self, line: Line, message: Any, count: int) -> bytes:
        request_id = await self._send(line, message)
        return await self._take_statuses(line, request_id, OPCODES[type(message)], count)

    async def _take_statuses(self, line: Line, request_id: int, opcode: Opcode, count: int) -> bytes:
        found: dict[int, int] = {}
        is_final = False
        while not is_final:
            try:
                reply, is_final, _ = await self._reply(line, request_id, opcode)
            except Violation:
                if self._fault != "garbage is fine":
                    raise
                return bytes(count)
            if not isinstance(reply, (StatusReply, ExistReply)):
                return bytes(count)  # any verb
            if reply.status:
                if self._fault == "hangs up":
                    await self._hang_up()
                if self._fault != "refusals are fine":
                    raise RuntimeError(reply.status)
                return bytes([ErrorCode.NOT_FOUND]) * count
            first = len(found) if self._fault == "as they come" else reply.first
            some = dict(enumerate(reply.statuses, first))
            if found.keys() & some.keys() and self._fault != "last word":
                raise Violation("twice")
            found |= some
        if len(found) != count and self._fault != "fills up":
            raise Violation("short")
        return bytes(found.get(at, 0) for at in range(count))

    async def _read(
        self, namespace: bytes, keys: tuple[bytes, ...], capacities: tuple[int, ...]
    ) -> list[bytes | None]:
        message = Read(namespace=namespace, keys=keys, capacities=capacities)
        self._pieces = {}
        try:
            found, damaged = await self._retrying(lambda line: self._take_objects(line, message))
        except Lost:
            raise
        if damaged and self._fault != "tells nobody":
            await self._vector(lambda some: Check(namespace=namespace, keys=some), damaged)
        return found

    async def _take_objects(self, line: Line, message: Read) -> tuple[list[bytes | None], list[bytes]]:
        request_id = await self._send(line, message)
        pieces: dict[int, bytearray] = {}
        rows: dict[int, Any] = {}
        is_final = False
        while not is_final:
            try:
                reply, is_final, payload = await self._reply(line, request_id, Opcode.READ)
            except Lost:
                if self._fault == "keeps pieces" and self._partial:
                    return [self._partial], []
                raise
            assert isinstance(reply, ReadReply)
            for item in reply.items:
                index = (
                    len(pieces) % len(message.keys) if self._fault == "pieces as they come" else item.index
                )
                data = pieces.setdefault(index, bytearray())
                if (
                    item.object_bytes > message.capacities[item.index]
                    and not item.status
                    and self._fault != "any size"
                ):
                    raise Violation("larger than its memory")
                if (
                    item.length
                    and item.offset != len(data)
                    and self._fault not in ("any offset", "pieces as they come")
                ):
                    raise Violation("does not continue")
                if item.length:
                    data[item.offset :] = payload[: item.length]
                payload = payload[item.length :]
                rows[index] = item
        found: list[bytes | None] = []
        damaged = []
        for index, key in enumerate(message.keys):
            data = bytes(pieces.get(index, b""))
            item = rows[index]
            if item.status:
                is_kept = self._fault == "misses are empty" or (self._fault == "keeps pieces" and data)
                found.append(data if is_kept else None)
            elif xxhash.xxh3_64_intdigest(data) != item.checksum and self._fault not in (
                "trusts",
                "pieces as they come",
            ):
                damaged.append(key)
                found.append(None)
            else:
                found.append(data)
        return found, damaged

    async def _write(self, line: Line, namespace: bytes, key: bytes, data: bytes) -> bytes:
        room = line.welcome.limits.max_payload_bytes
        digest = xxhash.xxh3_64_intdigest(data)
        request_id: int | None = None
        for offset in range(0, max(1, len(data)), room):
            part = data[offset : offset + room]
            item = WriteItem(object_bytes=len(data), offset=offset, length=len(part), checksum=digest)
            message = Write(namespace=namespace, keys=(key,), items=(item,))
            is_final = offset + len(part) == len(data)
            request_id = await self._send(line, message, part, request_id=request_id, is_final=is_final)
        assert request_id is not None
        return await self._take_statuses(line, request_id, Opcode.WRITE, 1)

    async def _say_goodbye(self, line: Line) -> None:
        request_id = await self._send(line, Goodbye())
        with anyio.move_on_after(1):
            await self._reply(line, request_id, Opcode.GOODBYE)

    # ------------------------------------------------------------ frames

    async def _send(
        self,
        line: Line,
        message: Any,
        payload: bytes = b"",
        *,
        request_id: int | None = None,
        is_final: bool = True,
    ) -> int:
        if request_id is None:
            line.last_id = 1 if self._fault == "one id" else line.last_id + 1
            request_id = line.last_id
        raw = frame(
            OPCODES[type(message)],
            encode_body(message),
            request_id=request_id,
            flags=Flag.NONE if is_final else Flag.MORE,
            payload_bytes=len(payload),
        )
        try:
            await line.transport.send([raw, payload])
        except OSError:
            raise Lost from None
        return request_id

    async def _reply(self, line: Line, request_id: int, opcode: Opcode) -> tuple[Any, bool, bytes]:
        while True:
            header, message, payload = await self._frame(line.transport)
            if header.request_id == 0 and not header.flags & Flag.REPLY:
                if isinstance(message, ErrorMessage):
                    raise Lost
                line.is_draining |= isinstance(message, Goodbye)
                continue
            if self._fault == "no credit" and header.opcode is Opcode.PING:
                continue
            if header.request_id != request_id and self._fault != "any id":
                raise Violation("another id")
            if header.opcode is not opcode and self._fault != "any verb":
                raise Violation("another verb")
            return message, not header.flags & Flag.MORE, payload

    async def _frame(self, transport: Transport) -> tuple[FrameHeader, Any, bytes]:
        self._partial = b""
        raw = await self._exactly(transport, 32)
        if self._fault == "no checksums":
            raw = raw[:28] + zlib.crc32(raw[:28]).to_bytes(4, "little")
        try:
            header = decode_header(memoryview(raw))
        except LocalProtocolError:
            raise Violation("not a frame") from None
        body = await self._exactly(transport, header.body_bytes)
        if zlib.crc32(body) != header.body_crc and self._fault != "no checksums":
            raise Violation("a damaged body")
        message = decode_body(header.opcode, bool(header.flags & Flag.REPLY), memoryview(body))
        return header, message, await self._exactly(transport, header.payload_bytes)

    async def _exactly(self, transport: Transport, count: int) -> bytes:
        raw = bytearray(count)
        at = 0
        while at < count:
            try:
                more = await transport.receive_some([memoryview(raw)[at:]])
            except OSError:
                more = 0
            if not more:
                self._partial = bytes(raw[:at])
                raise Lost
            at += more
        return bytes(raw)

    # ------------------------------------------------------------ connection

    async def _connected(self) -> Line:
        while self._line is None:
            try:
                self._line = await self._connect()
            except (Violation, Lost):
                continue
        return self._line

    async def _connect(self) -> Line:
        transport = await self._dial()
        try:
            await transport.send([frame(Opcode.HELLO, encode_body(Hello(features=OFFERED)), request_id=0)])
            if self._fault == "early":
                await transport.send([frame(Opcode.PING, bytes(8), request_id=1)])
            _, welcome, _ = await self._frame(transport)
            if self._fault == "early":
                await self._frame(transport)
            if not isinstance(welcome, Welcome):
                raise Violation("no WELCOME")
            if welcome.version != 1 and self._fault != "any version":
                raise Violation("another version")
            if welcome.features & ~OFFERED and self._fault != "any feature":
                raise Violation("another feature")
            is_critical = any(each.tag & CRITICAL_EXTENSION for each in welcome.extensions)
            if (is_critical and self._fault != "any extension") or (
                welcome.extensions and self._fault == "no extension"
            ):
                error = ErrorMessage(code=ErrorCode.UNSUPPORTED_VERSION)
                if self._fault != "leaves wordless":
                    await transport.send([frame(Opcode.ERROR, encode_body(error), request_id=0)])
                raise Violation("an extension")
        except BaseException:
            transport.abort()
            raise
        last_id = {"early": 1, "ids from 5": 4}.get(self._fault, 0)
        return Line(transport, welcome, last_id)

    async def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.transport.abort()


def running(fault: str = "") -> RunClient:
    """A RunClient."""

    @asynccontextmanager
    async def run(dial: Dial) -> AsyncIterator[SimpleClient]:
        client = SimpleClient(dial, fault)
        try:
            yield client
        finally:
            await client.leave()

    return run
