"""Cases from numbers: what goes out depends on the seed, the case's number and what the gateway announces.

Three kinds of case, each with connections that behave beside those that do not:

    valid    requests side by side, in frames cut and interleaved at will
    nearly   the same, and one frame with one thing wrong; whether it is wrong, `watch` says
    wild     bytes that are no protocol, or no handshake
"""

import hashlib
import random
from collections.abc import Callable, Sequence

import attrs
import xxhash

from adp_client.protocol import Feature
from adp_client.protocol.messages import (
    Check,
    Delete,
    Exist,
    Extension,
    Fence,
    Goodbye,
    Hello,
    Limits,
    Ping,
    Read,
    Request,
    Welcome,
    Write,
    WriteItem,
)

from .cases import Case, Step
from .spelling import Spelled, damaged, frame, garbage, violating

OFFERED = Feature.LEASES | Feature.FRAGMENTS | Feature.CREDITS | Feature.END_TO_END
SIZES = (0, 1, 7, 64, 1000, 4096, 4097, 4097, 20_000)
LARGE_BYTES = 200_000
WIDTHS = (1, 2, 7, 16, 40, 127, 128)
MAX_CONNECTIONS = 3
HELLO_BYTES = (4096, 65536, 1 << 20)
Frames = list[Spelled]


@attrs.define
class _Talk:
    """One connection while a case is made: ids, and what may still be asked before it must settle."""

    number: int
    rng: random.Random
    limits: Limits
    features: Feature
    next_id: int = 1
    requests: int = 0
    cost_bytes: int = 0

    def spelled(self, streams: Sequence[Frames]) -> bytes:
        """Frames of several messages, interleaved; a message gets its id when its first frame goes."""
        waiting = [list(stream) for stream in streams]
        ids: dict[int, int] = {}
        out = b""
        while any(waiting):
            which = self.rng.choice([at for at, stream in enumerate(waiting) if stream])
            if which not in ids:
                ids[which] = self.take_id()
            message, is_final, payload = waiting[which].pop(0)
            out += frame(message, ids[which], is_final=is_final, payload=payload)
        return out

    def take_id(self) -> int:
        """Rising, not always by one."""
        number = self.next_id
        self.next_id += 1 if self.rng.random() < 0.9 else self.rng.randrange(1, 1000)
        return number

    def charge(self, cost_bytes: int) -> bool:
        """Whether a request of this cost fits, with much to spare, before all have been answered."""
        fits = (
            self.requests < min(16, self.limits.max_requests // 2)
            and self.cost_bytes + cost_bytes <= self.limits.max_inflight_bytes // 4
        )
        if fits:
            self.requests += 1
            self.cost_bytes += cost_bytes
        return fits


class _Maker:
    """One case."""

    def __init__(self, seed: int, number: int, welcome: Welcome, salt: bytes) -> None:
        self.rng = random.Random(f"{seed}:{number}")
        self.limits = welcome.limits
        self.features = welcome.features
        stem = b"%s:%d:%d" % (salt, seed, number)
        self.namespaces = tuple(hashlib.sha256(stem + bytes([n])).digest() for n in range(2))
        self.steps: list[Step] = []
        self.talks: list[_Talk] = []
        widths = [width for width in WIDTHS if width <= self.limits.max_key_bytes]
        self.keys = {
            width: [self.rng.randbytes(width) for _ in range(self.rng.randrange(2, 8))]
            for width in self.rng.sample(widths, min(2, len(widths)))
        }

    # ------------------------------------------------------------ handshake

    def hello(self) -> Hello:
        rng = self.rng
        offered = rng.choice((OFFERED, Feature.NONE, Feature(rng.randrange(32) & OFFERED)))
        extensions = (Extension(tag=rng.randrange(0x8000), data=rng.randbytes(rng.randrange(9))),)
        return Hello(
            max_version=rng.choice((1, 1, 2, 65535)),
            features=offered,
            max_body_bytes=rng.choice(HELLO_BYTES),
            max_payload_bytes=rng.choice((0, 1024, *HELLO_BYTES, 1 << 24, 2**32 - 1)),
            agent="fuzz" * rng.randrange(3),
            extensions=extensions if rng.random() < 0.1 else (),
        )

    def dial(self) -> _Talk:
        hello = self.hello()
        talk = _Talk(len(self.talks), self.rng, self.limits, hello.features & self.features)
        self.talks.append(talk)
        raw = frame(hello, 0)
        self.steps.append(
            Step(do="dial", connection=talk.number, data=raw, pieces=self.pieces(len(raw)), how="welcome")
        )
        return talk

    # ------------------------------------------------------------ valid requests

    def width(self) -> int:
        return self.rng.choice(list(self.keys))

    def some_keys(self, most: int = 6) -> tuple[bytes, ...]:
        """Of one width; some may stand twice, some name nothing."""
        width = self.width()
        count = min(self.rng.randrange(1, most + 1), self.limits.max_items)
        fresh = self.rng.randbytes(width)
        return tuple(self.rng.choice([*self.keys[width], fresh]) for _ in range(count))

    def namespace(self) -> bytes:
        return self.namespaces[self.rng.random() < 0.2]

    def exist(self, talk: _Talk) -> Frames:
        keys = self.some_keys()
        if self.rng.random() < 0.01:  # as many as there may be
            width = len(keys[0])
            count = min(self.limits.max_items, (self.limits.max_body_bytes - 48) // width, 20_000)
            stem = self.rng.randbytes(width)
            keys = (*keys, *(stem for _ in range(count - len(keys))))[:count]
        lease_ms = 0
        if Feature.LEASES in talk.features and self.rng.random() < 0.5:
            lease_ms = self.rng.choice((1, 100, 400))  # a DELETE waits for them
        return [Spelled(Exist(namespace=self.namespace(), keys=keys, lease_ms=lease_ms))]

    def read(self, talk: _Talk) -> Frames:
        keys = self.some_keys()
        room = self.limits.max_inflight_bytes // 16 // len(keys)
        capacities = tuple(
            min(room, LARGE_BYTES if self.rng.random() < 0.9 else self.rng.choice(SIZES)) for _ in keys
        )
        if not talk.charge(sum(capacities)):
            return []
        return [Spelled(Read(namespace=self.namespace(), keys=keys, capacities=capacities))]

    def write(self, talk: _Talk) -> Frames:
        """In as many frames as chance likes. Now and then the bytes are not what the checksum says."""
        rng, limits = self.rng, self.limits
        namespace = self.namespace()
        most = min(limits.max_payload_bytes, 1 << 20)
        cuts = rng.random() < 0.4
        frames: Frames = []
        keys: list[bytes] = []
        items: list[WriteItem] = []
        payload = b""
        cost = 0
        sizes = [size for size in SIZES if size <= limits.max_object_bytes]
        for key in self.some_keys(4):
            size = rng.choice(sizes)
            if rng.random() < 0.03:
                size = min(LARGE_BYTES, limits.max_object_bytes)
            if not cost and not talk.charge(size):
                return []
            if cost + size > limits.max_inflight_bytes // 16:
                break
            cost += size
            data = rng.randbytes(size)
            checksum = xxhash.xxh3_64_intdigest(data)
            if rng.random() < 0.05:
                checksum ^= 1 << rng.randrange(64)
            at = 0
            while True:
                room = most - len(payload)
                step = min(size - at, room)
                if cuts and step and rng.random() < 0.6:
                    step = rng.randrange(1, step + 1)
                keys.append(key)
                items.append(WriteItem(object_bytes=size, offset=at, length=step, checksum=checksum))
                payload += data[at : at + step]
                at += step
                is_cut = at < size
                if is_cut or (cuts and rng.random() < 0.3) or len(payload) == most:
                    message = Write(namespace=namespace, keys=tuple(keys), items=tuple(items))
                    frames.append(Spelled(message, False, payload))
                    keys, items, payload = [], [], b""
                if not is_cut:
                    break
        if items:
            message = Write(namespace=namespace, keys=tuple(keys), items=tuple(items))
            return [*frames, Spelled(message, True, payload)]
        return [*frames[:-1], frames[-1]._replace(is_final=True)]

    def delete(self, talk: _Talk) -> Frames:
        return [Spelled(Delete(namespace=self.namespace(), keys=self.some_keys(3)))]

    def check(self, talk: _Talk) -> Frames:
        return [Spelled(Check(namespace=self.namespace(), keys=self.some_keys()))]

    def fence(self, talk: _Talk) -> Frames:
        return [Spelled(Fence())]

    def ping(self, talk: _Talk) -> Frames:
        return [Spelled(Ping(nonce=self.rng.getrandbits(64)))]

    def message(self, talk: _Talk) -> Frames:
        makers: tuple[Callable[[_Talk], Frames], ...] = (
            *(self.write, self.write, self.write, self.read, self.read, self.read),
            *(self.exist, self.exist, self.delete, self.check, self.fence, self.ping),
        )
        make = self.rng.choice(makers)
        if make not in (self.read, self.write) and not talk.charge(0):
            return []
        return make(talk)

    def batch(self, talk: _Talk, most: int = 5) -> bytes:
        streams = [self.message(talk) for _ in range(self.rng.randrange(1, most + 1))]
        return talk.spelled([stream for stream in streams if stream])

    # ------------------------------------------------------------ steps

    def pieces(self, size: int) -> tuple[int, ...]:
        """Where the sender pauses: mostly nowhere."""
        rng = self.rng
        if size < 2 or rng.random() < 0.6:
            return ()
        return tuple(rng.randrange(1, size) for _ in range(rng.randrange(1, 6)))

    def send(self, talk: _Talk, data: bytes, *, may_dribble: bool = True) -> None:
        if not data:
            return
        pieces, pause_ms = self.pieces(len(data)), self.rng.choice((0, 0, 1, 3))
        if may_dribble and self.rng.random() < 0.05:
            pieces, pause_ms = (1,) * min(40, len(data)), 1
        self.steps.append(
            Step(do="send", connection=talk.number, data=data, pieces=pieces, pause_ms=pause_ms)
        )

    def settle(self, talk: _Talk) -> None:
        self.steps.append(Step(do="settle", connection=talk.number))
        talk.requests = talk.cost_bytes = 0

    def drop(self, talk: _Talk) -> None:
        how = self.rng.choice(("close", "reset"))
        self.steps.append(Step(do="drop", connection=talk.number, how=how))
        self.talks.remove(talk)

    def release(self, talk: _Talk) -> None:
        self.steps.append(Step(do="release", connection=talk.number, request_id=talk.take_id()))
        self.settle(talk)

    def rounds(self, count: int, talks: Sequence[_Talk]) -> None:
        """Valid traffic."""
        for _ in range(count):
            talk = self.rng.choice(talks)
            self.send(talk, self.batch(talk))
            if self.rng.random() < 0.5 or not talk.charge(0):
                self.settle(talk)
            if Feature.LEASES in talk.features and self.rng.random() < 0.2:
                self.release(talk)

    def last_look(self, talk: _Talk) -> None:
        """Everything that is acknowledged must read back, or be a miss; what is deleted is a miss."""
        self.settle(talk)
        for namespace in self.namespaces:
            for keys in map(tuple, self.keys.values()):
                room = min(LARGE_BYTES, self.limits.max_inflight_bytes // 8 // len(keys))
                vector = Read(namespace=namespace, keys=keys, capacities=(room,) * len(keys))
                gone = Delete(namespace=namespace, keys=keys)
                asked: list[Request] = [vector, Exist(namespace=namespace, keys=keys)]
                for message in [*asked, gone, *asked] if self.rng.random() < 0.5 else asked:
                    self.send(talk, talk.spelled([[Spelled(message)]]), may_dribble=False)
                    self.settle(talk)

    def leave(self, talk: _Talk) -> None:
        self.send(talk, talk.spelled([[Spelled(Goodbye())]]))
        self.settle(talk)

    # ------------------------------------------------------------ kinds

    def valid(self) -> None:
        talks = [self.dial() for _ in range(self.rng.randrange(1, MAX_CONNECTIONS + 1))]
        self.rounds(self.rng.randrange(2, 9), talks)
        if len(talks) > 1 and self.rng.random() < 0.3:
            half = self.batch(talks[-1])
            if half and self.rng.random() < 0.7:
                self.send(talks[-1], half[: self.rng.randrange(1, len(half) + 1)])
            self.drop(talks[-1])
            talks.pop()
        elif self.rng.random() < 0.2:
            self.pause_inside(talks[0])
        self.last_look(self.rng.choice(talks))
        for talk in talks:
            if self.rng.random() < 0.5:
                self.leave(talk)

    def pause_inside(self, talk: _Talk) -> None:
        """Half a frame, silence, the rest of it."""
        raw = self.batch(talk)
        cut = self.rng.randrange(len(raw) + 1)
        self.send(talk, raw[:cut])
        pause_ms = self.rng.randrange(1, 100)
        self.steps.append(Step(do="silence", connection=talk.number, pause_ms=pause_ms))
        self.send(talk, raw[cut:])
        self.settle(talk)

    def nearly(self) -> None:
        good, bad = self.dial(), self.dial()
        self.rounds(self.rng.randrange(1, 5), [good, bad])
        valid = self.message(bad) or self.ping(bad)
        if self.rng.random() < 0.5:
            number = bad.take_id()
            raw = b"".join(
                frame(message, number, is_final=is_final, payload=payload)
                for message, is_final, payload in valid
            )
            raw = damaged(self.rng, raw)
        else:
            raw = violating(self.rng, bad.take_id(), self.limits, self.namespaces[0], self.some_keys())
        if self.rng.random() < 0.5:
            raw += self.batch(bad)
        self.send(bad, raw)
        self.rounds(self.rng.randrange(0, 3), [good])
        self.last_look(good)

    def wild(self) -> None:
        good = self.dial()
        self.rounds(self.rng.randrange(1, 3), [good])
        for _ in range(self.rng.randrange(1, MAX_CONNECTIONS)):
            if self.rng.random() < 0.5:
                bad = self.dial()
                self.send(bad, garbage(self.rng))
            else:
                self.bad_greeting()
        self.rounds(1, [good])
        self.last_look(good)

    def bad_greeting(self) -> None:
        rng = self.rng
        hello = self.hello()
        raw, how = frame(hello, 0), ""
        match rng.randrange(6):
            case 0:
                how, raw = "refusal", frame(attrs.evolve(hello, min_version=2, max_version=9), 0)
            case 1:
                critical = Extension(tag=0x8000 | rng.getrandbits(15), data=b"")
                how, raw = "refusal", frame(attrs.evolve(hello, extensions=(critical,)), 0)
            case 2:
                raw = damaged(rng, raw)
            case 3:
                raw += raw
            case 4:
                raw = raw[: rng.randrange(len(raw))]
            case _:
                raw = garbage(rng)
        number = len(self.talks)
        self.talks.append(_Talk(number, rng, self.limits, Feature.NONE))
        self.steps.append(Step(do="dial", connection=number, data=raw, pieces=self.pieces(len(raw)), how=how))


KINDS = {"valid": 5, "nearly": 4, "wild": 1}


def generate(seed: int, number: int, welcome: Welcome, *, salt: bytes = b"") -> Case:
    """Case `number` of `seed` for a gateway that announces `welcome`. `salt`: for its namespaces."""
    maker = _Maker(seed, number, welcome, salt)
    (kind,) = maker.rng.choices(list(KINDS), list(KINDS.values()))
    getattr(maker, kind)()
    return Case(number=number, kind=kind, namespaces=maker.namespaces, steps=tuple(maker.steps))
