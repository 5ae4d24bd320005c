"""Gateways that are wrong on purpose, each in one way: for every clause at least one that it must find."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any

import anyio
import attrs
import xxhash

from adp_client.protocol.codec import decode_body, encode_body
from adp_client.protocol.constants import ErrorCode, Feature, Flag, Opcode
from adp_client.protocol.errors import RemoteProtocolError
from adp_client.protocol.events import HelloReceived, RequestReceived
from adp_client.protocol.frames import decode_header
from adp_client.protocol.messages import (
    Check,
    Credit,
    Delete,
    Exist,
    ExistReply,
    Fence,
    Goodbye,
    Limits,
    Pong,
    Read,
    ReadItem,
    ReadRegion,
    ReadRegionReply,
    RegionOpen,
    RegionSource,
    RegionTarget,
    Release,
    Reply,
    StatusReply,
    Welcome,
    Write,
    WriteRegion,
)
from adp_client.protocol.workers import Place, WorkerMap, encode_worker_map
from adp_client.testing import MemoryGateway, Session
from adp_client.testing.conformance.frames import frame
from adp_client.testing.gateway import StoredObject
from adp_client.testing.leases import LeaseBook
from adp_client.testing.regions import MemoryRegions, Objects
from adp_client.transport.base import Part, Transport, local_transport

TOKEN = "the right token"


def checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


# ---------------------------------------------------------------- violations


class WrongCode(Session):
    """Every violation is told with one code, a wrong one."""

    async def refuse(self, violation: RemoteProtocolError) -> None:
        await super().refuse(RemoteProtocolError(str(violation), ErrorCode.TIMED_OUT))


class Wordless(Session):
    """Closes without saying why."""

    async def refuse(self, violation: RemoteProtocolError) -> None:
        pass


class Deaf(Session):
    """Neither says anything of a violation, nor closes."""

    async def refuse(self, violation: RemoteProtocolError) -> None:
        await anyio.sleep_forever()


class Lingering(Session):
    """Says why, and does not close; nor when it is time for other reasons."""

    def __init__(self, gateway: MemoryGateway, transport: Transport) -> None:
        super().__init__(gateway, UnclosableLocal(transport))


class TakesOthersDown(Session):
    """A violation ends every connection."""

    async def refuse(self, violation: RemoteProtocolError) -> None:
        await super().refuse(violation)
        self.gateway.cut()


class CarriesOn(Session):
    """Does what stands behind a frame of 40 bytes that broke the protocol."""

    async def refuse(self, violation: RemoteProtocolError) -> None:
        raw = self.connection._buffer.unparsed[40:]
        if len(raw) > 32:
            header = decode_header(raw[:32])
            message = decode_body(header.opcode, False, raw[32 : 32 + header.body_bytes])
            data = bytes(raw[32 + header.body_bytes :])
            self.gateway.put(message.namespace, message.keys[0], data)  # type: ignore[union-attr]
        await super().refuse(violation)


VIOLATIONS = (WrongCode, Wordless, Deaf, Lingering)


# ---------------------------------------------------------------- streams


@attrs.define
class Unclosable:
    """A transport that stays open."""

    inner: Transport

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        return await self.inner.receive_some(buffers)

    async def send(self, parts: Sequence[Part]) -> None:
        await self.inner.send(parts)

    def abort(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class UnclosableLocal(Unclosable):
    """And descriptors travel along."""

    @property
    def carries_descriptors(self) -> bool:
        return local_transport(self.inner) is not None

    async def receive_with_descriptors(
        self, buffers: Sequence[memoryview], descriptors: MutableSequence[int | None]
    ) -> int:
        inner = local_transport(self.inner)
        assert inner is not None
        return await inner.receive_with_descriptors(buffers, descriptors)


class WantsWholeHeaders(Unclosable):
    """Ends when a header comes in pieces."""

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        count = await self.inner.receive_some(buffers)
        if 0 < count < 32:
            self.inner.abort()
            return 0
        return count


class TakesOneFrame(Unclosable):
    """Of what comes together, only the first frame is seen."""

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        count = await self.inner.receive_some(buffers)
        sizes = bytes(buffers[0][16:24])
        first = 32 + int.from_bytes(sizes[:4], "little") + int.from_bytes(sizes[4:], "little")
        return min(count, first) if count >= 32 else count


def over(stream: Callable[[Transport], Any]) -> type[Session]:
    """A session that sees its transport through `stream`."""

    class Over(Session):
        def __init__(self, gateway: MemoryGateway, transport: Transport) -> None:
            super().__init__(gateway, stream(transport))

    return Over


# ---------------------------------------------------------------- handshake


def greeting(**changes: Any) -> type[Session]:
    """Its WELCOME has these fields, whatever is right."""

    class Greeting(Session):
        async def greet(self, event: HelloReceived) -> None:
            self.hello = event.hello
            fields = {"boot_id": bytes(16), "limits": self.gateway.limits, **changes}
            self.connection.accept(Welcome(**fields))
            body = encode_body(Welcome(**fields))
            await self.transport.send([frame(Opcode.HELLO, body, request_id=0, flags=Flag.REPLY)])

    return Greeting


class AbsurdLimits(Session):
    """Tells limits that the core would not say, and keeps others."""

    async def greet(self, event: HelloReceived) -> None:
        gateway, self.hello = self.gateway, event.hello
        welcome = Welcome(boot_id=gateway.boot_id, agent="absurd")
        self.connection.accept(welcome)
        body = encode_body(attrs.evolve(welcome, limits=gateway.limits))
        await self.transport.send([frame(Opcode.HELLO, body, request_id=0, flags=Flag.REPLY)])


class OneVersionOnly(Session):
    """Refuses who speaks later versions too."""

    async def greet(self, event: HelloReceived) -> None:
        if event.hello.max_version > 1:
            raise RemoteProtocolError("too modern", ErrorCode.UNSUPPORTED_VERSION)
        await super().greet(event)


class BeyondTheOffer(Session):
    """Welcomes in a version that the client did not name, if it named several."""

    async def greet(self, event: HelloReceived) -> None:
        if event.hello.max_version > 1:
            later = Welcome(version=301, boot_id=bytes(16), limits=self.gateway.limits)
            await self.transport.send([self.connection.accept(later)])
        else:
            await super().greet(event)


class NoExtensions(Session):
    """Refuses every extension."""

    async def greet(self, event: HelloReceived) -> None:
        if event.hello.extensions:
            raise RemoteProtocolError("what is this?", ErrorCode.UNSUPPORTED_VERSION)
        await super().greet(event)


PLACES = (Place(port=7172), Place(port=7173), Place(port=7174))


class Wavering(Session):
    """A worker that says something else on every other connection."""

    first = WorkerMap(gateway_id=bytes(16), places=PLACES, worker=1)
    then: WorkerMap | None = None

    async def greet(self, event: HelloReceived) -> None:
        told = self.then if len(self.gateway.sessions) % 2 == 0 else self.first
        self.gateway.extensions = () if told is None else (encode_worker_map(told),)
        await super().greet(event)


class ForgetsOthers(Wavering):
    """Has been alone all the time."""


class AnotherGateway(Wavering):
    """Draws its id each time."""

    then = WorkerMap(gateway_id=b"\1" * 16, places=PLACES, worker=1)


class OthersMove(Wavering):
    """Sends clients elsewhere."""

    then = WorkerMap(gateway_id=bytes(16), places=PLACES[::-1], worker=1)


class AnotherWorker(Wavering):
    """Is somebody else."""

    then = WorkerMap(gateway_id=bytes(16), places=PLACES, worker=2)


class AnyToken(Session):
    """Lets everybody in."""

    async def greet(self, event: HelloReceived) -> None:
        hello = attrs.evolve(event.hello, token=TOKEN.encode())
        await super().greet(HelloReceived(hello=hello))


class LongTokens(Session):
    """Looks at as many bytes of the token as it has itself."""

    async def greet(self, event: HelloReceived) -> None:
        hello = attrs.evolve(event.hello, token=event.hello.token[: len(TOKEN)])
        await super().greet(HelloReceived(hello=hello))


class AnotherBootEachTime(Session):
    """Says that it has been restarted, to every client."""

    async def greet(self, event: HelloReceived) -> None:
        self.gateway.boot_id = os.urandom(16)
        await super().greet(event)


class AgreesToEverything(Session):
    """Does what needs a feature also when it was not agreed on."""

    async def greet(self, event: HelloReceived) -> None:
        await super().greet(event)
        self.connection.features |= Feature.LEASES | Feature.REGIONS


class IgnoresClientLimits(Session):
    """Sends frames as large as it likes."""

    async def greet(self, event: HelloReceived) -> None:
        await super().greet(event)
        hello = attrs.evolve(self.hello, max_body_bytes=1 << 20, max_payload_bytes=16 << 20)
        self.hello = self.connection._hello = hello


# ---------------------------------------------------------------- objects


class Folded(dict[tuple[bytes, bytes], StoredObject]):
    """Objects whose names are changed on the way in and out."""

    def __init__(self, fold: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> None:
        super().__init__()
        self.fold = fold

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self.fold(*name))  # type: ignore[misc]

    def __setitem__(self, name: tuple[bytes, bytes], value: StoredObject) -> None:
        super().__setitem__(self.fold(*name), value)

    def get(self, name: tuple[bytes, bytes], default: Any = None) -> Any:
        return super().get(self.fold(*name), default)

    def pop(self, name: tuple[bytes, bytes], default: Any = None) -> Any:
        return super().pop(self.fold(*name), default)


def folding(fold: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> Callable[[], MemoryGateway]:
    def make() -> MemoryGateway:
        gateway = MemoryGateway()
        gateway.objects = Folded(fold)
        return gateway

    return make


def changing(
    change: Callable[[list[StoredObject | None]], list[StoredObject | None]],
) -> Callable[[], MemoryGateway]:
    """A gateway whose READs see `change` of what is stored."""

    class Changing(MemoryGateway):
        @contextlib.contextmanager
        def reading(self, names: Sequence[tuple[bytes, bytes]]) -> Iterator[list[StoredObject | None]]:
            with super().reading(names) as found:
                yield change(found)

    return Changing


def each(
    change: Callable[[StoredObject | None], StoredObject | None],
) -> Callable[[list[StoredObject | None]], list[StoredObject | None]]:
    return lambda found: [change(stored) for stored in found]


def flip_large(stored: StoredObject | None) -> StoredObject | None:
    if stored is None or len(stored.data) < 4097:
        return stored
    data = stored.data[:-1] + bytes([stored.data[-1] ^ 1])
    return StoredObject(data, checksum(data))


def swap_late(found: list[StoredObject | None]) -> list[StoredObject | None]:
    if len(found) > 200:
        found[199], found[200] = found[200], found[199]
    return found


def empty_if_absent(stored: StoredObject | None) -> StoredObject | None:
    return StoredObject(b"", checksum(b"")) if stored is None else stored


def absent_if_empty(stored: StoredObject | None) -> StoredObject | None:
    return stored if stored is not None and stored.data else None


class NoReads(MemoryGateway):
    """Does not know what is being read."""

    def is_read(self, namespace: bytes, keys: Sequence[bytes]) -> bool:
        return False


class EndlessReads(MemoryGateway):
    """Takes a READ for under way for ever."""

    @contextlib.contextmanager
    def reading(self, names: Sequence[tuple[bytes, bytes]]) -> Iterator[list[StoredObject | None]]:
        self._reads.update(names)
        with super().reading(names) as found:
            yield found


class Uncut(MemoryGateway):
    """Does not announce FRAGMENTS, and stores what it would have to cut."""

    def __init__(self) -> None:
        super().__init__(fragments=False)

    @property
    def largest_bytes(self) -> int:
        return self.limits.max_object_bytes


# ---------------------------------------------------------------- replies


def replying(change: Callable[[RequestReceived, Reply], Reply]) -> type[Session]:
    """Its replies, but for READ's and DELETE's, are changed."""

    class Replying(Session):
        def _reply_to(self, event: RequestReceived) -> Reply:
            return change(event, super()._reply_to(event))

    return Replying


def exist_all(event: RequestReceived, reply: Reply) -> Reply:
    return (
        attrs.evolve(reply, statuses=bytes(len(reply.statuses))) if isinstance(reply, ExistReply) else reply
    )


def forget_late(event: RequestReceived, reply: Reply) -> Reply:
    if not isinstance(reply, ExistReply):
        return reply
    return attrs.evolve(reply, statuses=reply.statuses[:1000].ljust(len(reply.statuses), b"\1"))


def once_each(event: RequestReceived, reply: Reply) -> Reply:
    if not isinstance(event.message, Exist) or not isinstance(reply, ExistReply):
        return reply
    seen: set[bytes] = set()
    statuses = bytearray(reply.statuses)
    for at, key in enumerate(event.message.keys):
        if key in seen:
            statuses[at] = ErrorCode.NOT_FOUND
        seen.add(key)
    return attrs.evolve(reply, statuses=bytes(statuses))


def short_nonce(event: RequestReceived, reply: Reply) -> Reply:
    return Pong(nonce=reply.nonce & 0xFFFFFFFF) if isinstance(reply, Pong) else reply


def check_all(event: RequestReceived, reply: Reply) -> Reply:
    is_check = isinstance(event.message, Check) and isinstance(reply, StatusReply)
    return StatusReply(statuses=bytes(len(event.message.keys))) if is_check else reply  # type: ignore[union-attr]


class CheckDrops(Session):
    """CHECK is the end of what it looks at."""

    def _check(self, namespace: bytes, key: bytes) -> ErrorCode:
        code = super()._check(namespace, key)
        self.gateway.objects.pop((namespace, key), None)
        return code


class NoSizes(Session):
    """TOO_LARGE without saying how large."""

    def _read_rows(self, *args: Any) -> Iterator[tuple[ReadItem, memoryview]]:
        for item, data in super()._read_rows(*args):
            is_too_large = item.status is ErrorCode.TOO_LARGE
            yield (attrs.evolve(item, object_bytes=0) if is_too_large else item), data


class OneByteShort(Session):
    """Wants a byte more than it needs."""

    def _read_rows(self, capacities: Sequence[int], *args: Any) -> Iterator[tuple[ReadItem, memoryview]]:
        return super()._read_rows([capacity - 1 for capacity in capacities], *args)


# ---------------------------------------------------------------- WRITE


class Trusting(Session):
    """Believes every checksum."""

    def _store(self, request_id: int, namespace: bytes) -> bytes:
        rows = self._open_writes[request_id]
        self._open_writes[request_id] = [(key, data, checksum(data)) for key, data, _ in rows]
        return super()._store(request_id, namespace)


class TrustsLarge(Session):
    """Believes the checksums of large objects."""

    def _store(self, request_id: int, namespace: bytes) -> bytes:
        self._open_writes[request_id] = [
            (key, data, checksum(data) if len(data) > 65536 else wanted)
            for key, data, wanted in self._open_writes[request_id]
        ]
        return super()._store(request_id, namespace)


class DropsComplaints(Session):
    """Says OK of what it did not store."""

    def _store(self, request_id: int, namespace: bytes) -> bytes:
        return bytes(len(super()._store(request_id, namespace)))


class StoresAndComplains(Session):
    """Says CORRUPT, rightly, and stores it all the same."""

    def _store(self, request_id: int, namespace: bytes) -> bytes:
        for key, data, _ in self._open_writes[request_id]:
            self.gateway.put(namespace, key, bytes(data))
        return super()._store(request_id, namespace)


class StoresNothing(Session):
    """Says OK, and that is all."""

    def _store(self, request_id: int, namespace: bytes) -> bytes:
        return bytes(len(self._open_writes.pop(request_id)))


class KeepsTails(Session):
    """Writes over what is there, without cutting it."""

    def _store(self, request_id: int, namespace: bytes) -> bytes:
        before = dict(self.gateway.objects)
        statuses = super()._store(request_id, namespace)
        for name, old in before.items():
            new = self.gateway.objects[name].data
            self.gateway.put(*name, new + old.data[len(new) :])
        return statuses


class LosesContinuations(Session):
    """Keeps the first frame of an object."""

    def _collect(self, request_id: int, message: Write) -> None:
        super()._collect(request_id, message)
        for item in message.items:
            if item.offset:
                key, data, wanted = self._open_writes[request_id][-1]
                self._open_writes[request_id][-1] = (key, data[:1], wanted)


class MixesWrites(Session):
    """What continues an object continues the object that was begun last, in whichever request."""

    def _collect(self, request_id: int, message: Write) -> None:
        if message.items[0].offset:
            self._open_writes[max(self._open_writes)][-1][1].extend(self._memory[0])
            self._memory = []
        else:
            super()._collect(request_id, message)


class Eager(Session):
    """What has come of an object is there."""

    def _collect(self, request_id: int, message: Write) -> None:
        super()._collect(request_id, message)
        for key, data, _ in self._open_writes[request_id]:
            self.gateway.put(message.namespace, key, bytes(data))


class ClearsFirst(Session):
    """Drops what is there when a WRITE of it begins."""

    def _collect(self, request_id: int, message: Write) -> None:
        super()._collect(request_id, message)
        for key in message.keys:
            self.gateway.objects.pop((message.namespace, key), None)


class KeepsHalf(Session):
    """Stores what has come when the connection ends."""

    namespace = b""

    def _collect(self, request_id: int, message: Write) -> None:
        super()._collect(request_id, message)
        self.namespace = message.namespace

    async def _serve(self) -> None:
        try:
            await super()._serve()
        finally:
            for key, data, _ in itertools.chain(*self._open_writes.values()):
                self.gateway.put(self.namespace, key, bytes(data))


class OneOfEach(Session):
    """Refuses a key that stands twice."""

    def _store(self, request_id: int, namespace: bytes) -> bytes:
        names = [key for key, _, _ in self._open_writes[request_id]]
        statuses = super()._store(request_id, namespace)
        is_again = [name in names[:at] for at, name in enumerate(names)]
        return bytes(
            ErrorCode.REFUSED if again else status for again, status in zip(is_again, statuses, strict=True)
        )


# ---------------------------------------------------------------- order


class DeleteLies(Session):
    """Says OK to DELETE, and keeps everything."""

    async def answer(self, event: RequestReceived) -> None:
        before = dict(self.gateway.objects)
        await super().answer(event)
        if isinstance(event.message, Delete):
            self.gateway.objects.update(before)


class OneAtATime(Session):
    """Answers nothing while a WRITE is open."""

    def _next_request(self) -> RequestReceived | None:
        asked = {each.request_id for each in self._asked}
        return None if set(self._open_writes) - asked else super()._next_request()


class NoBarriers(Session):
    """Answers FENCE and GOODBYE at once, and READ and WRITE later."""

    def _next_request(self) -> RequestReceived | None:
        return self._asked.popleft() if self._asked else None

    async def answer(self, event: RequestReceived) -> None:
        if isinstance(event.message, Goodbye):
            self._unanswered.discard(event.request_id)
            raw = frame(Opcode.GOODBYE, request_id=event.request_id, flags=Flag.REPLY)
            await self.transport.send([raw])
        elif isinstance(event.message, (Read, Write)) and event not in self._delayed:
            self._delayed.append(event)
            self.answer_later(event, 0.05)
        else:
            await super().answer(event)

    def __init__(self, gateway: MemoryGateway, transport: Transport) -> None:
        super().__init__(gateway, transport)
        self._delayed: list[RequestReceived] = []


class UnboundedWindow(Session):
    """Takes whatever comes."""

    async def greet(self, event: HelloReceived) -> None:
        await super().greet(event)
        self.connection._window.resize(1 << 30, 1 << 62)


class LeakingWindow(Session):
    """Never forgets a request."""

    async def greet(self, event: HelloReceived) -> None:
        await super().greet(event)
        self.connection._window.close = lambda cost_bytes: None  # type: ignore[method-assign]


class TooMuchCredit(Session):
    """Gives more than WELCOME promised."""

    more = 1

    async def send_reply(self, *args: Any, **options: Any) -> None:
        await super().send_reply(*args, **options)
        if Feature.CREDITS in self.connection.features:
            credit = Credit(requests=self.gateway.limits.max_requests + self.more, inflight_bytes=1 << 20)
            await self.transport.send([frame(Opcode.CREDIT, encode_body(credit), request_id=0)])


class NoCredit(TooMuchCredit):
    """Leaves no room for anything, for ever."""

    more = -Limits().max_requests


# ---------------------------------------------------------------- leases


class NeverGrants(Session):
    """Takes the question for one without a lease."""

    def _look_up(self, message: Exist) -> ExistReply:
        return super()._look_up(attrs.evolve(message, lease_ms=0))


class GrantsForEver(Session):
    """Grants what is asked for, whatever its maximum."""

    def _look_up(self, message: Exist) -> ExistReply:
        return attrs.evolve(super()._look_up(message), lease_ms=message.lease_ms)


class OneForAll(LeaseBook):
    """Every lease has one id."""

    def grant(self, *args: Any) -> int:
        self._last_id = 0
        return super().grant(*args)


class ReleasesAnything(LeaseBook):
    """Says OK to every RELEASE."""

    def release(self, owner: object, lease_id: int) -> bool:
        super().release(owner, lease_id)
        return True


class ForAnybody(LeaseBook):
    """Lets others release a lease."""

    def release(self, owner: object, lease_id: int) -> bool:
        lease = self._leases.get(lease_id)
        return super().release(lease.owner if lease is not None else owner, lease_id)


class HoldsNothing(LeaseBook):
    """Grants leases that mean nothing."""

    def is_held(self, subject: tuple[bytes, bytes]) -> bool:
        return False


class OutlivesConnections(LeaseBook):
    """Keeps leases whose connection has ended."""

    def leave(self, owner: object) -> None:
        pass


class NeverRunsOut(LeaseBook):
    """Leases end when they are released."""

    def grant(self, owner: object, subjects: Any, seconds: float) -> int:
        return super().grant(owner, subjects, seconds + 1e6)


class OnTheFirst(LeaseBook):
    """A lease is on the first object that was found."""

    def grant(self, owner: object, subjects: Iterable[tuple[bytes, bytes]], seconds: float) -> int:
        return super().grant(owner, list(subjects)[:1], seconds)


class OnAllButTheLast(LeaseBook):
    """A lease is on all objects that were found, but for the last of many."""

    def grant(self, owner: object, subjects: Iterable[tuple[bytes, bytes]], seconds: float) -> int:
        found = list(subjects)
        return super().grant(owner, found[:-1] or found, seconds)


class LeasesTheDeleted(LeaseBook):
    """Grants leases on what a DELETE waits for."""

    def is_claimed(self, subject: tuple[bytes, bytes]) -> bool:
        return False


class LeasesAnyKey(Session):
    """A lease is on what was asked for, whatever is said of it."""

    def _look_up(self, message: Exist) -> ExistReply:
        reply = super()._look_up(message)
        if reply.lease_id:
            subjects = [(message.namespace, key) for key in message.keys]
            self.gateway.leases.grant(self, subjects, reply.lease_ms / 1000)
        return reply


class HidesTheDeleted(Session):
    """What a DELETE waits for is there for nobody."""

    def _look_up(self, message: Exist) -> ExistReply:
        reply = super()._look_up(message)
        statuses = bytearray(reply.statuses)
        for at, key in enumerate(message.keys):
            if self.gateway.leases.is_claimed((message.namespace, key)):
                statuses[at] = ErrorCode.NOT_FOUND
        return attrs.evolve(reply, statuses=bytes(statuses))


class LeasedIsReadOnly(Session):
    """Takes a lease for a lock."""

    def _store(self, request_id: int, namespace: bytes) -> bytes:
        rows = self._open_writes[request_id]
        if any(self.gateway.leases.is_held((namespace, key)) for key, _, _ in rows):
            return bytes([ErrorCode.REFUSED] * len(self._open_writes.pop(request_id)))
        return super()._store(request_id, namespace)


class LeasedStays(Session):
    """Says OK to WRITE of a leased key, and keeps the object."""

    def _store(self, request_id: int, namespace: bytes) -> bytes:
        before = {
            name: stored for name, stored in self.gateway.objects.items() if self.gateway.leases.is_held(name)
        }
        statuses = super()._store(request_id, namespace)
        self.gateway.objects.update(before)
        return statuses


class WriteEndsLeases(Session):
    """A lease is on the object and not on the key."""

    def _store(self, request_id: int, namespace: bytes) -> bytes:
        keys = {key for key, _, _ in self._open_writes[request_id]}
        book = self.gateway.leases
        for lease_id, lease in list(book._leases.items()):
            if any((namespace, key) in lease.subjects for key in keys):
                book._leases[lease_id] = attrs.evolve(lease, subjects=frozenset())
        return super()._store(request_id, namespace)


class ReleasesInTurn(Session):
    """RELEASE waits behind a FENCE like everything else."""

    def _next_request(self) -> RequestReceived | None:
        event = super()._next_request()
        waits = event is not None and isinstance(event.message, Release)
        if waits and any(isinstance(each.message, Fence) for each in self._asked):
            self._asked.append(event)  # type: ignore[arg-type]
            return None
        return event


def with_book(book: type[LeaseBook]) -> Callable[[], MemoryGateway]:
    def make() -> MemoryGateway:
        gateway = MemoryGateway()
        gateway.leases = book()
        return gateway

    make.__name__ = book.__name__
    return make


# ---------------------------------------------------------------- regions


class OneFurther(MemoryRegions):
    """Begins a byte late."""

    def _put(self, target: RegionTarget, data: bytes) -> ErrorCode:
        return super()._put(attrs.evolve(target, offset=target.offset + 1), data)


class OneByteMore(MemoryRegions):
    """Ends a byte late."""

    def _put(self, target: RegionTarget, data: bytes) -> ErrorCode:
        return super()._put(target, data.ljust(target.capacity + 1, b"\0"))


class OneByteLess(MemoryRegions):
    """Ends a byte early."""

    def _put(self, target: RegionTarget, data: bytes) -> ErrorCode:
        return super()._put(target, data[:-1])


class OtherChecksums(MemoryRegions):
    """Says that the bytes are others."""

    def read(self, objects: Objects, message: ReadRegion) -> tuple[ReadItem, ...]:
        rows = super().read(objects, message)
        return tuple(attrs.evolve(row, checksum=row.checksum ^ 1) for row in rows)


class FromTheBeginning(MemoryRegions):
    """Takes every object from where the region begins."""

    def _take(self, source: RegionSource) -> bytes:
        return super()._take(attrs.evolve(source, offset=0))


class SaysSo(MemoryRegions):
    """Says OK to WRITE_REGION, and that is all."""

    def write(self, objects: Objects, message: WriteRegion) -> bytes:
        return super().write({}, message)


class NothingIsRefused(MemoryRegions):
    """Takes no bytes for bytes outside."""

    def _judge(self, number: int, offset: int, length: int) -> ErrorCode:
        return super()._judge(number, offset, length) if length else ErrorCode.REFUSED


class AbsentIsEmpty(MemoryRegions):
    """Brings no bytes of what is not there."""

    def read(self, objects: Objects, message: ReadRegion) -> tuple[ReadItem, ...]:
        rows = super().read(objects, message)
        return tuple(ReadItem(index=row.index) if row.status is ErrorCode.NOT_FOUND else row for row in rows)


class Unsized(MemoryRegions):
    """TOO_LARGE without saying how large."""

    def read(self, objects: Objects, message: ReadRegion) -> tuple[ReadItem, ...]:
        return tuple(
            attrs.evolve(row, object_bytes=0) if row.status is ErrorCode.TOO_LARGE else row
            for row in super().read(objects, message)
        )


class PutsItAllTheSame(MemoryRegions):
    """Finds out that an object is too large when it is there."""

    def read(self, objects: Objects, message: ReadRegion) -> tuple[ReadItem, ...]:
        rows = super().read(objects, message)
        for row, key, target in zip(rows, message.keys, message.targets, strict=True):
            if row.status is ErrorCode.TOO_LARGE:
                self._put(target, objects[message.namespace, key].data)
        return rows


class TakesAnything(MemoryRegions):
    """Believes every checksum in WRITE_REGION."""

    def write(self, objects: Objects, message: WriteRegion) -> bytes:
        sources = tuple(
            attrs.evolve(source, checksum=checksum(self._take(source))) for source in message.sources
        )
        return super().write(objects, attrs.evolve(message, sources=sources))


class TakesAndComplains(MemoryRegions):
    """Says CORRUPT, rightly, and stores it all the same."""

    def write(self, objects: Objects, message: WriteRegion) -> bytes:
        for key, source in zip(message.keys, message.sources, strict=True):
            objects[message.namespace, key] = StoredObject(self._take(source), source.checksum)
        return super().write(objects, message)


def judging(judge: Callable[[MemoryRegions, int, int, int], ErrorCode | None]) -> Callable[[], MemoryGateway]:
    """A gateway that looks at places in its own way; None: the right way."""

    class Judging(MemoryRegions):
        def _judge(self, number: int, offset: int, length: int) -> ErrorCode:
            status = judge(self, number, offset, length)
            return super()._judge(number, offset, length) if status is None else status

        def _put(self, target: RegionTarget, data: bytes) -> ErrorCode:
            return super()._put(target, data) if self._is_real(target) else ErrorCode.OK

        def _take(self, source: RegionSource) -> bytes:
            return super()._take(source) if self._is_real(source) else b"\xee" * source.length

        def _is_real(self, place: RegionTarget | RegionSource) -> bool:
            return place.region in self.regions and place.offset < 1 << 63

    return with_regions(Judging)


def unknown_is_refused(house: MemoryRegions, number: int, offset: int, length: int) -> ErrorCode | None:
    return None if number in house.regions else ErrorCode.REFUSED


def unknown_is_right(house: MemoryRegions, number: int, offset: int, length: int) -> ErrorCode | None:
    return None if number in house.regions else ErrorCode.OK


def in_machine_words(house: MemoryRegions, number: int, offset: int, length: int) -> ErrorCode:
    is_within = (offset + length) % (1 << 64) <= house.regions[number][1]
    return ErrorCode.OK if is_within else ErrorCode.REFUSED


def within_the_file(house: MemoryRegions, number: int, offset: int, length: int) -> ErrorCode:
    is_within = offset + length <= os.fstat(house.regions[number][0]).st_size
    return ErrorCode.OK if is_within else ErrorCode.REFUSED


def outside_is_stale(house: MemoryRegions, number: int, offset: int, length: int) -> ErrorCode:
    is_within = offset + length <= house.regions[number][1]
    return ErrorCode.OK if is_within else ErrorCode.STALE_EPOCH


class AllOrNothing(Session):
    """Refuses a whole request for one place that is not right."""

    def _reply_to(self, event: RequestReceived) -> Reply:
        message = event.message
        if isinstance(message, (ReadRegion, WriteRegion)):
            places = [
                (place.region, place.offset, getattr(place, "capacity", getattr(place, "length", 0)))
                for place in (message.targets if isinstance(message, ReadRegion) else message.sources)
            ]
            if any(self.regions._judge(*place) for place in places):
                kind = ReadRegionReply if isinstance(message, ReadRegion) else StatusReply
                return kind(status=ErrorCode.REFUSED)
        return super()._reply_to(event)


class MakesItLonger(MemoryRegions):
    """Writes where the file was cut off."""

    def _put(self, target: RegionTarget, data: bytes) -> ErrorCode:
        os.pwrite(self.regions[target.region][0], data, target.offset)
        return ErrorCode.OK


class TakesThePageForCorrupt(MemoryRegions):
    """Blames the checksum where the file was cut off."""

    def write(self, objects: Objects, message: WriteRegion) -> bytes:
        statuses = super().write(objects, message)
        return statuses.replace(bytes([ErrorCode.REFUSED]), bytes([ErrorCode.CORRUPT]))


class DiesOfIt(Session):
    """Ends, with everybody, when a file was cut off."""

    def _reply_to(self, event: RequestReceived) -> Reply:
        reply = super()._reply_to(event)
        if isinstance(event.message, ReadRegion) and any(
            os.fstat(fd).st_size < size for fd, size in self.regions.regions.values()
        ):
            self.gateway.cut()
        return reply


class AnyFile(MemoryRegions):
    """Makes a region of whatever comes."""

    def _is_fit(self, fd: int, size_bytes: int) -> bool:
        return True


class AnyKindOfFile(MemoryRegions):
    """Looks at the size only."""

    def _is_fit(self, fd: int, size_bytes: int) -> bool:
        return 0 < size_bytes <= os.fstat(fd).st_size


class EndsOnRefusals(Session):
    """Has enough of a client that offers what is no region."""

    async def answer(self, event: RequestReceived) -> None:
        await super().answer(event)
        if isinstance(event.message, RegionOpen) and not self.regions.regions:
            self.transport.abort()


class TheLastCounts(MemoryRegions):
    """Lets a region replace another."""

    def open(self, number: int, size_bytes: int) -> ErrorCode:
        self.close(number)
        return super().open(number, size_bytes)


class SaysOpened(MemoryRegions):
    """Says OK to REGION_OPEN of a number in use, and keeps the first."""

    def open(self, number: int, size_bytes: int) -> ErrorCode:
        super().open(number, size_bytes)
        return ErrorCode.OK


class NeverCloses(MemoryRegions):
    """Says OK to REGION_CLOSE, and keeps the region."""

    def close(self, number: int) -> ErrorCode:
        return ErrorCode.OK if number in self.regions else ErrorCode.STALE_EPOCH

    def leave(self) -> None:
        for number in list(self.regions):
            super().close(number)
        super().leave()


class AlwaysCloses(MemoryRegions):
    """Says OK to every REGION_CLOSE."""

    def close(self, number: int) -> ErrorCode:
        super().close(number)
        return ErrorCode.OK


class ClosesFirst(Session):
    """Answers REGION_CLOSE at once, and READ_REGION later, into the region as it was."""

    def __init__(self, gateway: MemoryGateway, transport: Transport) -> None:
        super().__init__(gateway, transport)
        self.regions = NeverCloses()
        self._delayed: list[RequestReceived] = []

    async def answer(self, event: RequestReceived) -> None:
        if isinstance(event.message, ReadRegion) and event not in self._delayed:
            self._delayed.append(event)
            self.answer_later(event, 0.05)
        else:
            await super().answer(event)


class Unplugged(Session):
    """Takes REGION_OPEN without a descriptor, and any number of descriptors with anything."""

    async def greet(self, event: HelloReceived) -> None:
        await super().greet(event)
        self.connection._check_descriptors = lambda header: None  # type: ignore[method-assign]

    def _reply_to(self, event: RequestReceived) -> Reply:
        if isinstance(event.message, RegionOpen) and not self.regions.received:
            return StatusReply(status=ErrorCode.REFUSED)
        return super()._reply_to(event)


def with_regions(kind: Callable[[], MemoryRegions], name: str = "") -> Callable[[], MemoryGateway]:
    class Sharing(Session):
        def __init__(self, gateway: MemoryGateway, transport: Transport) -> None:
            super().__init__(gateway, transport)
            self.regions = kind()

    make = with_session(Sharing)
    make.__name__ = name or getattr(kind, "__name__", "")
    return make


def regions_for_everybody() -> MemoryGateway:
    """One house for all connections, of which none empties it."""

    class OneHouse(NeverCloses):
        def leave(self) -> None:
            pass

    house = OneHouse()
    return with_regions(lambda: house)()


# ---------------------------------------------------------------- which clause finds which


def with_session(session_type: type[Session], **settings: Any) -> Callable[[], MemoryGateway]:
    def make() -> MemoryGateway:
        gateway = MemoryGateway(token=TOKEN, **settings)
        gateway.session_type = session_type
        return gateway

    make.__name__ = session_type.__name__
    return make


Make = Callable[[], MemoryGateway]

_VIOLATION_CLAUSES = (
    *(
        "3.1-magic",
        "3.1-other-protocol",
        "3.1-version",
        "3.1-header-checksum",
        "3.1-opcode",
        "3.1-body-limit",
    ),
    *("3.1-payload-limit", "3.1-body-checksum", "3.1-order-of-checks", "3.1-body-too-short"),
    *("3.1-body-too-long", "3.1-reserved", "3.1-payload-size", "3.1-payload-where-none-belongs", "3.2-flags"),
    *("3.2-more", "3.2-reply", "3.3-id-twice", "3.3-id-zero", "4.1-hello-first", "4.1-hello-twice"),
    *("4.1-hello-size", "4.1-hello-id", "4.2-no-version", "4.2-versions-reversed", "4.3-hello-malformed"),
    *(
        "4.4-extension-critical",
        "4.4-extension-malformed",
        "4.4-lease-not-agreed",
        "4.4-not-agreed",
        "8-token",
    ),
    *("5.1-no-keys", "5.1-count", "5.1-argument", "5.1-too-many-items", "5.1-key-width", "5.5-too-large"),
    *("5.5-continues-nothing", "5.5-unfinished", "5.11-reason", "7.4-requests", "7.4-bytes"),
)


#: clause id -> gateways that it must fail
MUTANTS: Mapping[str, Sequence[Make]] = {
    "3.1-bytes-one-by-one": [with_session(over(WantsWholeHeaders))],
    "3.1-frames-together": [with_session(over(TakesOneFrame))],
    "3.2-frames-alternate": [with_session(MixesWrites), with_session(OneAtATime)],
    "7.3-others-go-on": [with_session(TakesOthersDown), with_session(KeepsHalf)],
    "7.3-nothing-after": [with_session(CarriesOn)],
    "4.2-version-in-range": [with_session(OneVersionOnly), with_session(BeyondTheOffer)],
    "4.3-limits": [with_session(Session, limits=Limits(max_inflight_bytes=1 << 20))],
    "4.3-boot-id": [with_session(AnotherBootEachTime)],
    "4.4-features": [with_session(greeting(features=Feature.FRAGMENTS))],
    "4.4-unknown-features": [with_session(greeting(features=Feature.FRAGMENTS))],
    "4.4-extension-skipped": [with_session(NoExtensions)],
    "4.5-workers": [
        with_session(each) for each in (ForgetsOthers, AnotherGateway, OthersMove, AnotherWorker)
    ],
    "10-full": [with_session(greeting(features=Feature.LEASES | Feature.CREDITS))],
    "5.1-narrow-and-wide-keys": [
        folding(lambda namespace, key: (namespace, key[:0] if len(key) > 64 else key))
    ],
    "5.1-whole-keys": [
        folding(lambda namespace, key: (namespace, key[:127])),
        folding(lambda namespace, key: (namespace, key[-127:])),
        folding(lambda namespace, key: (namespace, key[:64])),
    ],
    "5.1-opaque-keys": [
        folding(lambda namespace, key: (namespace, key.lower())),
        folding(lambda namespace, key: (namespace, key.rstrip(b"\0"))),
    ],
    "5.1-namespaces": [
        folding(lambda namespace, key: (b"", key)),
        folding(lambda namespace, key: (namespace[:31], key)),
    ],
    "5.1-twice": [with_session(replying(once_each))],
    "5.3-exist": [with_session(replying(exist_all))],
    "5.3-exist-many": [with_session(replying(forget_late))],
    "5.2-small-frames": [with_session(IgnoresClientLimits)],
    "5.4-exact": [
        changing(each(flip_large)),
        changing(each(lambda stored: stored and StoredObject(stored.data, stored.checksum ^ 1))),
    ],
    "5.4-not-found": [changing(each(empty_if_absent))],
    "5.4-empty": [changing(each(absent_if_empty))],
    "5.4-too-large": [with_session(NoSizes), with_session(OneByteShort)],
    "5.4-small-frames": [with_session(IgnoresClientLimits)],
    "5.4-many": [changing(swap_late)],
    "5.5-overwrite": [with_session(KeepsTails)],
    "5.5-corrupt": [with_session(Trusting), with_session(StoresAndComplains)],
    "5.5-corrupt-over-another": [with_session(StoresAndComplains)],
    "5.5-corrupt-large": [
        with_session(TrustsLarge),
        with_session(DropsComplaints),
        with_session(StoresAndComplains),
    ],
    "5.5-frames": [with_session(LosesContinuations)],
    "5.5-invisible": [with_session(Eager)],
    "5.5-old-until-complete": [with_session(Eager), with_session(ClearsFirst)],
    "5.5-cut": [with_session(KeepsHalf)],
    "4.4-no-fragments": [Uncut],
    "5.5-twice-in-one": [with_session(OneOfEach)],
    "5.9-effects": [with_session(StoresNothing), with_session(DeleteLies)],
    "5.6-delete": [with_session(DeleteLies)],
    "5.6-waits-for-reads": [NoReads],
    "5.6-reader-lost": [EndlessReads],
    "5.7-check": [with_session(replying(check_all)), with_session(CheckDrops)],
    "5.8-fence": [with_session(NoBarriers)],
    "5.8-fence-waits": [with_session(NoBarriers)],
    "5.9-side-by-side": [with_session(OneAtATime)],
    "5.10-ping": [with_session(replying(short_nonce))],
    "5.11-goodbye": [with_session(NoBarriers), with_session(Lingering)],
    "5.11-error": [with_session(Lingering)],
    "7.4-freed": [with_session(LeakingWindow)],
    "5.3-lease": [with_session(NeverGrants), with_session(GrantsForEver)],
    "5.12-release": [with_book(OneForAll), with_book(ReleasesAnything)],
    "5.12-release-foreign": [with_book(ForAnybody), with_book(ReleasesAnything)],
    "5.3-lease-holds": [with_book(HoldsNothing)],
    "5.3-lease-covers-all": [with_book(OnTheFirst), with_book(OnAllButTheLast)],
    "5.3-lease-write": [
        with_session(LeasedIsReadOnly),
        with_session(LeasedStays),
        with_session(WriteEndsLeases),
    ],
    "5.3-lease-not-while-deleted": [
        with_book(LeasesTheDeleted),
        with_session(LeasesAnyKey),
        with_session(HidesTheDeleted),
    ],
    "5.12-release-at-once": [with_session(ReleasesInTurn)],
    "5.3-lease-ends-with-connection": [with_book(OutlivesConnections)],
    "5.3-lease-runs-out": [with_book(NeverRunsOut)],
    "5.14-read": [with_regions(kind) for kind in (OneFurther, OneByteMore, OneByteLess, OtherChecksums)],
    "5.14-write": [with_regions(FromTheBeginning), with_regions(SaysSo)],
    "5.14-empty": [with_regions(NothingIsRefused), with_regions(SaysSo)],
    "5.14-not-found": [with_regions(AbsentIsEmpty)],
    "5.14-too-large": [with_regions(Unsized), with_regions(PutsItAllTheSame)],
    "5.14-small-frames": [with_session(IgnoresClientLimits)],
    "5.14-corrupt": [with_regions(TakesAnything), with_regions(TakesAndComplains)],
    "5.14-unknown-region": [
        judging(unknown_is_refused),
        judging(unknown_is_right),
        with_session(AllOrNothing),
    ],
    "5.14-bounds": [
        judging(in_machine_words),
        judging(within_the_file),
        judging(outside_is_stale),
        with_session(AllOrNothing),
    ],
    "5.14-shrunk": [
        with_regions(MakesItLonger),
        with_regions(TakesThePageForCorrupt),
        with_session(DiesOfIt),
    ],
    "5.14-open-refused": [
        with_regions(AnyFile),
        with_regions(AnyKindOfFile),
        with_session(EndsOnRefusals),
    ],
    "5.14-open-twice": [with_regions(TheLastCounts), with_regions(SaysOpened)],
    "5.14-close": [with_regions(NeverCloses), with_regions(AlwaysCloses)],
    "5.14-close-waits": [with_session(ClosesFirst)],
    "5.14-own": [regions_for_everybody],
    "5.12-credit": [
        with_session(TooMuchCredit, features=Feature.FRAGMENTS | Feature.CREDITS),
        with_session(NoCredit, features=Feature.FRAGMENTS | Feature.CREDITS),
    ],
} | {
    clause: [with_session(mutant) for mutant in VIOLATIONS] + more
    for clause, more in {
        **{clause: [] for clause in _VIOLATION_CLAUSES},
        "4.2-no-version": [with_session(greeting())],
        "4.4-extension-critical": [with_session(greeting())],
        "4.4-lease-not-agreed": [with_session(AgreesToEverything)],
        "4.4-not-agreed": [with_session(AgreesToEverything)],
        "5.14-no-descriptor": [with_session(Unplugged)],
        "5.14-stray-descriptor": [with_session(Unplugged)],
        "5.14-not-agreed": [with_session(AgreesToEverything)],
        "7.4-requests": [with_session(UnboundedWindow)],
        "7.4-bytes": [with_session(UnboundedWindow)],
        "8-token": [with_session(AnyToken), with_session(LongTokens)],
    }.items()
}
