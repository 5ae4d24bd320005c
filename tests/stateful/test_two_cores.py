"""A client core and a gateway core against a model, over a wire that breaks bytes anywhere.

The model is a dict of objects, a set of leases and one of regions; every feature is agreed on. Requests are
answered in any order, in any parts; the window is narrowed and opened, and the gateway drains, while requests
are on their way. Every reply must be the one for its request, every payload byte must land where it belongs,
and at the end nothing is in flight.
"""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adp_client.protocol import Connection, ErrorCode, Feature, Role
from adp_client.protocol.events import (
    NoticeReceived,
    PayloadExpected,
    PeerClosed,
    ReplyReceived,
    RequestReceived,
)
from adp_client.protocol.messages import (
    Credit,
    Delete,
    Exist,
    ExistReply,
    Goodbye,
    GoodbyeReply,
    Hello,
    Limits,
    Message,
    Ping,
    Pong,
    Read,
    ReadItem,
    ReadRegion,
    ReadRegionReply,
    ReadReply,
    RegionClose,
    RegionOpen,
    RegionSource,
    RegionTarget,
    Release,
    StatusReply,
    Welcome,
    Write,
    WriteItem,
    WriteRegion,
)
from adp_client.protocol.state import State

NAMESPACE = bytes(32)
KEYS = [bytes([65 + n]) * 4 for n in range(3)]
FEATURES = Feature.LEASES | Feature.REGIONS | Feature.CREDITS
LIMITS = Limits(max_requests=6, max_inflight_bytes=4000, max_payload_bytes=64, max_object_bytes=300)


class Side:
    """A core, what it has to send, and memory for the payload that is coming in."""

    def __init__(self, role: Role) -> None:
        self.connection = Connection(role)
        self.wire: deque[int] = deque()
        self.said = 0
        self.heard = 0
        self.descriptors: deque[int] = deque()  # where in what was said they go along
        self.events: list[object] = []
        self.memory: dict[int, bytearray] = {}

    def say(self, raw: bytes, *, has_descriptor: bool = False) -> None:
        if has_descriptor:
            self.descriptors.append(self.said)
        self.said += len(raw)
        self.wire.extend(raw)

    def hear(self, other: "Side", count: int) -> None:
        while count and other.wire:
            view = self.connection.receive_buffers()[0]
            size = min(count, len(view), len(other.wire))
            # As a system does: one descriptor at a time, with the piece in which its frame begins.
            if len(other.descriptors) > 1:
                size = min(size, other.descriptors[1] - self.heard)
            view[:size] = bytes(other.wire.popleft() for _ in range(size))
            came = int(bool(other.descriptors) and other.descriptors[0] < self.heard + size)
            if came:
                other.descriptors.popleft()
            self.heard += size
            self.connection.bytes_received(size, descriptors=came)
            count -= size
            self.take_events()

    def take_events(self) -> None:
        while (event := self.connection.next_event()) is not None:
            if isinstance(event, PayloadExpected):
                place = self.memory.setdefault(event.request_id, bytearray())
                begin = len(place)
                place.extend(bytes(sum(event.lengths)))
                targets = [memoryview(bytearray(length)) for length in event.lengths]
                self.connection.accept_payload(targets)
                self._landing = (place, begin, targets)
                continue
            if isinstance(event, (RequestReceived, ReplyReceived)) and getattr(self, "_landing", None):
                place, begin, targets = self._landing
                place[begin:] = b"".join(targets)
                self._landing = None
            self.events.append(event)

    _landing: tuple[bytearray, int, list[memoryview]] | None = None


class TwoCores(RuleBasedStateMachine):
    @initialize()
    def shake_hands(self) -> None:
        self.client, self.gateway = Side(Role.CLIENT), Side(Role.GATEWAY)
        self.client.say(self.client.connection.hello(Hello(max_payload_bytes=64, features=FEATURES)))
        self.gateway.hear(self.client, 1 << 20)
        welcome = Welcome(boot_id=bytes(16), limits=LIMITS, features=FEATURES)
        self.gateway.say(self.gateway.connection.accept(welcome))
        self.client.hear(self.gateway, 1 << 20)
        self.gateway.events.clear()
        self.client.events.clear()
        self.objects: dict[bytes, bytes] = {}
        self.asked: dict[int, Message] = {}
        self.written: dict[int, dict[bytes, bytes]] = {}
        self.pending: dict[int, list[Message]] = {}
        self.expected: dict[int, object] = {}
        self.open_reply: dict[int, deque[tuple[Message, bytes]]] = {}
        self.leases: set[int] = set()
        self.regions: set[int] = set()
        self.last_lease = 0
        self.notices: deque[Credit | Goodbye] = deque()
        self.is_leaving = False
        self.steps = 0

    def _request(self, message: Message, cost: int = 0) -> int | None:
        self.steps += 1
        if self.client.connection.state is not State.OPEN or not self.client.connection.fits(cost):
            return None
        number, raw = self.client.connection.request(message)  # type: ignore[arg-type]
        self.client.say(raw, has_descriptor=isinstance(message, RegionOpen))
        self.asked[number] = message
        return number

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    def exist(self, keys: list[bytes]) -> None:
        self._request(Exist(namespace=NAMESPACE, keys=tuple(keys)))

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3), lease_ms=st.sampled_from([1, 60_000]))
    def exist_with_a_lease(self, keys: list[bytes], lease_ms: int) -> None:
        self._request(Exist(namespace=NAMESPACE, keys=tuple(keys), lease_ms=lease_ms))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Leases that it has, and ones that nobody ever had."""
        ids = data.draw(st.lists(st.integers(1, self.last_lease + 2), min_size=1, max_size=3))
        self._request(Release(lease_ids=tuple(ids)))

    @rule(region=st.integers(1, 3), is_open=st.booleans())
    def open_or_close_a_region(self, region: int, is_open: bool) -> None:
        self._request(RegionOpen(region=region, region_bytes=4096) if is_open else RegionClose(region=region))

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3), region=st.integers(1, 3))
    def read_into_a_region(self, keys: list[bytes], region: int) -> None:
        targets = tuple(RegionTarget(region=region, offset=300 * at, capacity=300) for at in range(len(keys)))
        message = ReadRegion(namespace=NAMESPACE, keys=tuple(keys), targets=targets)
        self._request(message, 300 * len(keys))

    @rule(key=st.sampled_from(KEYS), region=st.integers(1, 3), length=st.integers(0, 300))
    def write_from_a_region(self, key: bytes, region: int, length: int) -> None:
        source = RegionSource(region=region, offset=0, length=length, checksum=length)
        self._request(WriteRegion(namespace=NAMESPACE, keys=(key,), sources=(source,)), length)

    @rule(requests=st.integers(1, 6), inflight_bytes=st.sampled_from([0, 10, 500, 4000]))
    def credit(self, requests: int, inflight_bytes: int) -> None:
        """The gateway narrows the window or opens it; requests may be on their way meanwhile."""
        if self.gateway.connection.state is State.OPEN:
            self._notify(Credit(requests=requests, inflight_bytes=inflight_bytes))

    @precondition(lambda self: self.steps > 30)
    @rule()
    def drain(self) -> None:
        if self.gateway.connection.state is State.OPEN:
            self._notify(Goodbye(code=ErrorCode.SHUTTING_DOWN))

    def _notify(self, notice: Credit | Goodbye) -> None:
        self.gateway.say(self.gateway.connection.notice(notice))
        self.notices.append(notice)

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: bytes) -> None:
        self._request(Delete(namespace=NAMESPACE, keys=(key,)))

    @rule(nonce=st.integers(0, 2**64 - 1))
    def ping(self, nonce: int) -> None:
        self._request(Ping(nonce=nonce))

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4), capacity=st.sampled_from([300, 50, 0])
    )
    def read(self, keys: list[bytes], capacity: int) -> None:
        message = Read(namespace=NAMESPACE, keys=tuple(keys), capacities=(capacity,) * len(keys))
        self._request(message, capacity * len(keys))

    @rule(key=st.sampled_from(KEYS), size=st.integers(0, 300), seed=st.integers(0, 255))
    def write(self, key: bytes, size: int, seed: int) -> None:
        data = bytes((seed + n) % 256 for n in range(size))
        if self.client.connection.state is not State.OPEN or not self.client.connection.fits(len(data)):
            return
        number: int | None = None
        at = 0
        while True:
            part = data[at : at + 60]
            item = WriteItem(object_bytes=len(data), offset=at, length=len(part), checksum=len(data))
            at += len(part)
            message = Write(namespace=NAMESPACE, keys=(key,), items=(item,))
            number, raw = self.client.connection.request(message, request_id=number, is_final=at == len(data))
            self.client.say(raw + part)
            if at == len(data):
                break
        self.asked[number] = message
        self.written[number] = {key: data}

    @precondition(lambda self: self.steps > 25)
    @rule()
    def goodbye(self) -> None:
        """Also from a connection that drains."""
        connection = self.client.connection
        if connection.state in (State.OPEN, State.DRAINING) and connection.fits(0):
            number, raw = connection.request(Goodbye())
            self.client.say(raw)
            self.asked[number] = Goodbye()
            self.is_leaving = True

    @rule(count=st.sampled_from([4000, 400, 40, 1]))
    def bytes_reach_the_gateway(self, count: int) -> None:
        self.gateway.hear(self.client, count)
        for event in self.gateway.events:
            assert isinstance(event, RequestReceived)
            if event.is_final:
                self._serve(event)
        self.gateway.events.clear()

    def _serve(self, event: RequestReceived) -> None:
        """Apply the request to the model at once; its answer goes out later, in parts."""
        number, message = event.request_id, event.message
        assert message == self.asked[number]
        parts: list[tuple[Message, bytes]] = []
        if isinstance(message, Exist):
            outcome = bytes(int(key not in self.objects) for key in message.keys)
            lease_id = 0
            if message.lease_ms and 0 in outcome:
                self.last_lease += 1
                lease_id = self.last_lease
                self.leases.add(lease_id)
            parts = [
                (
                    ExistReply(
                        first=n,
                        statuses=outcome[n : n + 1],
                        lease_id=lease_id,
                        lease_ms=message.lease_ms if lease_id else 0,
                    ),
                    b"",
                )
                for n in range(len(outcome))
            ]
            self.expected[number] = outcome
        elif isinstance(message, Release):
            outcome = bytes(
                ErrorCode.OK if lease_id in self.leases else ErrorCode.STALE_EPOCH
                for lease_id in message.lease_ids
            )
            self.leases.difference_update(message.lease_ids)
            parts = [(StatusReply(first=n, statuses=outcome[n : n + 1]), b"") for n in range(len(outcome))]
            self.expected[number] = outcome
        elif isinstance(message, (RegionOpen, RegionClose)):
            (self.regions.add if isinstance(message, RegionOpen) else self.regions.discard)(message.region)
            parts = [(StatusReply(), b"")]
            self.expected[number] = b""
        elif isinstance(message, WriteRegion):
            ((key,), (source,)) = message.keys, message.sources
            outcome = bytes([ErrorCode.STALE_EPOCH])
            if source.region in self.regions:
                self.objects[key] = bytes(source.length)
                outcome = bytes([ErrorCode.OK])
            parts = [(StatusReply(statuses=outcome), b"")]
            self.expected[number] = outcome
        elif isinstance(message, ReadRegion):
            landed = []
            for index in reversed(range(len(message.keys))):
                data = self.objects.get(message.keys[index])
                if message.targets[index].region not in self.regions:
                    row = ReadItem(index=index, status=ErrorCode.STALE_EPOCH)
                elif data is None:
                    row = ReadItem(index=index, status=ErrorCode.NOT_FOUND)
                else:
                    row = ReadItem(index=index, object_bytes=len(data), length=len(data), checksum=1)
                landed.append(row)
                parts.append((ReadRegionReply(items=(row,)), b""))
            self.expected[number] = landed
        elif isinstance(message, Delete):
            outcome = bytes(int(self.objects.pop(key, None) is None) for key in message.keys)
            parts = [(StatusReply(statuses=outcome), b"")]
            self.expected[number] = outcome
        elif isinstance(message, Write):
            ((key, data),) = self.written[number].items()
            assert self.gateway.memory.pop(number, bytearray()) == data
            self.objects[key] = data
            parts = [(StatusReply(statuses=b"\0"), b"")]
            self.expected[number] = b"\0"
        elif isinstance(message, Read):
            wanted = b""
            for index in reversed(range(len(message.keys))):
                data = self.objects.get(message.keys[index])
                if data is None:
                    parts.append((ReadReply(items=(ReadItem(index=index, status=ErrorCode.NOT_FOUND),)), b""))
                elif len(data) > message.capacities[index]:
                    item = ReadItem(index=index, status=ErrorCode.TOO_LARGE, object_bytes=len(data))
                    parts.append((ReadReply(items=(item,)), b""))
                else:
                    wanted += data
                    for at in range(0, max(len(data), 1), 50):
                        piece = data[at : at + 50]
                        item = ReadItem(
                            index=index, object_bytes=len(data), offset=at, length=len(piece), checksum=1
                        )
                        parts.append((ReadReply(items=(item,)), piece))
            self.expected[number] = wanted
        elif isinstance(message, Ping):
            parts = [(Pong(nonce=message.nonce), b"")]
            self.expected[number] = message.nonce
        else:
            parts = [(GoodbyeReply(), b"")]
            self.expected[number] = None
        self.open_reply[number] = deque(parts)

    @precondition(lambda self: self.open_reply)
    @rule(data=st.data())
    def gateway_sends_a_part(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.open_reply)))
        parts = self.open_reply[number]
        message, payload = parts[0]
        if isinstance(message, GoodbyeReply) and self.gateway.connection.in_flight > 1:
            return
        parts.popleft()
        raw = self.gateway.connection.reply(number, message, is_final=not parts)  # type: ignore[arg-type]
        self.gateway.say(raw + payload)
        if not parts:
            del self.open_reply[number]

    @rule(count=st.sampled_from([4000, 400, 40, 1]))
    def bytes_reach_the_client(self, count: int) -> None:
        self.client.hear(self.gateway, count)
        for event in self.client.events:
            if isinstance(event, NoticeReceived):
                assert event.notice == self.notices.popleft()
                continue
            assert isinstance(event, ReplyReceived)
            self._check(event)
        self.client.events.clear()

    def _check(self, event: ReplyReceived) -> None:
        number, message = event.request_id, event.message
        if isinstance(message, (ExistReply, StatusReply)):
            wanted = self.expected[number]
            assert isinstance(wanted, bytes)
            assert message.statuses == wanted[message.first : message.first + len(message.statuses)]
        elif isinstance(message, ReadRegionReply):
            landed = self.expected[number]
            assert isinstance(landed, list)
            for row in message.items:
                landed.remove(row)
            assert not event.is_final or not landed
        elif isinstance(message, Pong):
            assert message.nonce == self.expected[number]
        elif isinstance(message, ReadReply) and event.is_final:
            assert self.client.memory.pop(number, bytearray()) == self.expected[number]
        if event.is_final:
            del self.asked[number]

    @invariant()
    def windows_agree(self) -> None:
        if not hasattr(self, "client"):
            return
        assert self.client.connection.in_flight <= LIMITS.max_requests
        assert self.client.connection.in_flight >= self.gateway.connection.in_flight

    def teardown(self) -> None:
        """Let everything arrive: every request has been answered, and both sides agree that it is over."""
        if not hasattr(self, "client"):
            return
        for _ in range(3):
            self.bytes_reach_the_gateway(1 << 20)
            for number in sorted(self.open_reply):
                while number in self.open_reply:
                    before = len(self.open_reply[number])
                    message, payload = self.open_reply[number][0]
                    if isinstance(message, GoodbyeReply) and self.gateway.connection.in_flight > 1:
                        break
                    self.open_reply[number].popleft()
                    raw = self.gateway.connection.reply(number, message, is_final=before == 1)  # type: ignore[arg-type]
                    self.gateway.say(raw + payload)
                    if before == 1:
                        del self.open_reply[number]
            self.bytes_reach_the_client(1 << 20)
        assert not self.asked
        assert not self.notices
        assert self.client.connection.in_flight == self.gateway.connection.in_flight == 0
        assert self.client.connection.fits(LIMITS.max_inflight_bytes)
        if self.is_leaving:
            assert self.client.connection.state is self.gateway.connection.state is State.CLOSED
        for side in (self.client, self.gateway):
            side.connection.bytes_received(0)
            assert side.connection.next_event() == PeerClosed(is_clean=True)


TestTwoCores = pytest.mark.timeout(300)(TwoCores.TestCase)  # shrinking a finding takes minutes
TestTwoCores.settings = settings(stateful_step_count=80)
