"""What any client must do (sections 3 to 7, from the other side), whatever the gateway does."""

from collections.abc import Awaitable, Callable, Sequence

import anyio
import attrs

from adp_client.protocol.constants import CRITICAL_EXTENSION, ErrorCode, Feature, Opcode
from adp_client.protocol.events import HelloReceived, RequestReceived
from adp_client.protocol.messages import (
    Check,
    Delete,
    ErrorMessage,
    Exist,
    ExistReply,
    Extension,
    Fence,
    Goodbye,
    Limits,
    Pong,
    Read,
    ReadItem,
    ReadReply,
    Welcome,
)
from adp_client.testing.gateway import MemoryGateway, Script, Session

from .clause import Broken, Chapter, NotApplicable, expect, shown
from .peer import checksum_of
from .scene import (
    QUIET_SECONDS,
    Part,
    Scene,
    SlowToGreet,
    asked,
    expect_statuses,
    expect_true_or_error,
    requests_of,
)
from .trial import EVERYTHING, content

CONDUCT: Chapter[Scene] = Chapter()

OK, NOT_FOUND = ErrorCode.OK, ErrorCode.NOT_FOUND


Lie = Callable[[Part, RequestReceived], Awaitable[None]]


def _liar(kind: type, lie: Lie) -> Script:
    """A script: `lie(session, event)` answers the first such request, if it comes on the first connection."""
    told: list[RequestReceived] = []

    async def script(session: Session, event: RequestReceived) -> bool:
        assert isinstance(session, Part)
        is_victim = session.is_first and isinstance(event.message, kind) and not told
        if is_victim:
            told.append(event)
            await lie(session, event)
        return is_victim

    return script


# ---------------------------------------------------------------- handshake


@CONDUCT.clause("4.1-nothing-before-welcome")
async def nothing_before_welcome(scene: Scene) -> None:
    """A client says HELLO, and nothing more until WELCOME."""
    async with scene.play(session_type=SlowToGreet) as (client, gateway):
        found = await scene.attempt("EXIST", client.exist(scene.namespace, scene.keys(1)))
        expect_statuses("EXIST", [NOT_FOUND], found)
        (first, *_) = gateway.sessions
        assert isinstance(first, SlowToGreet)
        if first.was_early:
            raise Broken("expected nothing between HELLO and WELCOME, got something")


class _WrongVersion(Part):
    async def greet(self, event: HelloReceived) -> None:
        if not self.is_first:
            return await super().greet(event)
        welcome = Welcome(version=event.hello.max_version + 6, boot_id=bytes(16), limits=self.gateway.limits)
        return await self.say_welcome(welcome)


class _WrongFeatures(Part):
    async def greet(self, event: HelloReceived) -> None:
        if not self.is_first:
            return await super().greet(event)
        others = EVERYTHING & ~event.hello.features
        return await self.say_welcome(Welcome(features=others, boot_id=bytes(16), limits=self.gateway.limits))


class _Extended(Part):
    tag = 0x7001

    async def greet(self, event: HelloReceived) -> None:
        if not self.is_first:
            return await super().greet(event)
        self.hello = event.hello
        welcome = Welcome(
            boot_id=bytes(16),
            limits=self.gateway.limits,
            extensions=(Extension(tag=self.tag, data=b"of a later time"),),
        )
        return await self.transport.send([self.connection.accept(welcome)])


class _CriticallyExtended(_Extended):
    tag = CRITICAL_EXTENSION | 0x7001


async def _expect_refusal(scene: Scene, session_type: type[Part]) -> MemoryGateway:
    """The client does not use a connection with this WELCOME, and closes it."""
    async with scene.play(session_type=session_type, may_violate=True) as (client, gateway):
        found = await scene.attempt("EXIST", client.exist(scene.namespace, scene.keys(1)))
        expect_true_or_error("EXIST", [NOT_FOUND], found)
        if not gateway.sessions:
            raise Broken("expected a client that connects, got none")
        expect("requests behind a WELCOME that must be refused", [], asked(gateway.sessions[0]))
        await scene.until_over(gateway.sessions[0])
    return gateway


@CONDUCT.clause("4.2-version-not-offered")
async def version_not_offered(scene: Scene) -> None:
    """A WELCOME in a version that HELLO did not name is refused."""
    await _expect_refusal(scene, _WrongVersion)


@CONDUCT.clause("4.4-feature-not-offered")
async def feature_not_offered(scene: Scene) -> None:
    """A WELCOME with a feature that HELLO did not have is refused."""
    async with scene.play() as (client, gateway):
        await scene.attempt("EXIST", client.exist(scene.namespace, scene.keys(1)))
        offers = [session.hello.features for session in gateway.sessions]
    if not offers or not EVERYTHING & ~offers[0]:
        raise NotApplicable("the client offers every feature")
    await _expect_refusal(scene, _WrongFeatures)


@CONDUCT.clause("4.4-extension-skipped")
async def extension_skipped(scene: Scene) -> None:
    """An extension in WELCOME that a client does not know is skipped."""
    async with scene.play(session_type=_Extended) as (client, gateway):
        found = await scene.attempt("EXIST", client.exist(scene.namespace, scene.keys(1)))
        expect_statuses("EXIST", [NOT_FOUND], found)
        expect("connections", 1, len(gateway.sessions))


@CONDUCT.clause("4.4-extension-critical")
async def extension_critical(scene: Scene) -> None:
    """An extension in WELCOME that must not be skipped and is not known refuses the handshake."""
    gateway = await _expect_refusal(scene, _CriticallyExtended)
    said = [notice.code for notice in gateway.sessions[0].notices if isinstance(notice, ErrorMessage)]
    expect("the codes of the ERRORs of the client", [ErrorCode.UNSUPPORTED_VERSION], said)


@CONDUCT.clause("4.3-limits")
async def limits(scene: Scene) -> None:
    """What is above the gateway's limits for a request or a frame is cut, and put together again."""
    told = Limits(max_items=4, max_body_bytes=400, max_payload_bytes=500, max_object_bytes=3000)
    names = scene.keys(10)
    objects = [content(number * 150, number) for number in range(10)]
    async with scene.play(limits=told) as (client, _):
        written = await scene.attempt("WRITE", client.write(scene.namespace, names, objects))
        expect_statuses("WRITE of ten objects", [OK] * 10, written)
        found = await scene.attempt("EXIST", client.exist(scene.namespace, [*names, b"key of no object"]))
        expect_statuses("EXIST of eleven keys", [OK] * 10 + [NOT_FOUND], found)
        read = await scene.attempt("READ", client.read(scene.namespace, names, [3000] * 10))
        expect("READ of ten objects", objects, None if read is None else list(read))


@CONDUCT.clause("4.3-new-boot")
async def new_boot(scene: Scene) -> None:
    """A client that sees another boot id forgets what it knew: it asks again what exists."""
    (key,) = scene.keys(1)
    async with scene.play() as (client, gateway):
        gateway.put(scene.namespace, key, b"of the first boot")
        found = await scene.attempt("EXIST", client.exist(scene.namespace, [key]))
        expect_statuses("EXIST in the first boot", [OK], found)
        gateway.objects.clear()
        gateway.restart(b"another boot id.")
        found = await scene.attempt("EXIST", client.exist(scene.namespace, [key]))
        if found is None:  # it may have needed that call to find out
            found = await scene.attempt("EXIST", client.exist(scene.namespace, [key]))
        expect_statuses("EXIST after a restart without the object", [NOT_FOUND], found)


# ---------------------------------------------------------------- requests


async def _late(session: Session, event: RequestReceived) -> bool:
    """Later ones sooner: the first request of a connection waits longest."""
    is_last_word = isinstance(event.message, Goodbye)
    if not is_last_word:
        session.answer_later(event, QUIET_SECONDS * (1 + 1 / event.request_id))
    return not is_last_word


@CONDUCT.clause("3.3-ids")
async def ids(scene: Scene) -> None:
    """Request ids begin at 1, rise, and are never used again; each call gets its own answer, in any order."""
    names = scene.keys(12)
    objects = {name: content(100 + number, number) for number, name in enumerate(names)}
    async with scene.play() as (client, gateway):
        for name, data in objects.items():
            gateway.put(scene.namespace, name, data)
        gateway.script = _late
        calls = [client.read(scene.namespace, [name], [200]) for name in names]
        found = await scene.together("READ", calls)
        for name, got in zip(names, found, strict=True):
            expect_true_or_error("READ among others", [objects[name]], got)
        gateway.script = None
        await scene.attempt("EXIST", client.exist(scene.namespace, names))
        for session in gateway.sessions:
            numbers = [request.request_id for request in session.requests]
            if numbers and (numbers[0] != 1 or numbers != sorted(set(numbers))):
                raise Broken(f"request ids: expected 1 and then rising ones, got {shown(numbers)}")


@CONDUCT.clause("7.4-window")
async def window(scene: Scene) -> None:
    """A client keeps no more requests, and no more bytes, in flight than the window takes."""
    told = Limits(max_requests=3, max_inflight_bytes=5000, max_object_bytes=2000)
    names = scene.keys(10)
    async with scene.play(limits=told) as (client, gateway):
        for number, name in enumerate(names):
            gateway.put(scene.namespace, name, content(1900, number))
        gateway.script = _late
        reads = [client.read(scene.namespace, [name], [1900]) for name in names]
        found = await scene.together("READ", reads)
        for number, got in enumerate(found):
            expect_true_or_error("READ in a small window", [content(1900, number)], got)
        exists = [client.exist(scene.namespace, [name]) for name in names]
        for each in await scene.together("EXIST", exists):
            expect_true_or_error("EXIST in a small window", [OK], each)


class _Counting(Part):
    """Notes how many requests were open at a time since it sent a CREDIT."""

    most_open = 0

    async def _take(self, event: RequestReceived) -> None:
        if event.request_id > 1 and not isinstance(event.message, Goodbye):
            self.most_open = max(self.most_open, 1 + len(self._unanswered - {event.request_id}))
        await super()._take(event)


@CONDUCT.clause("5.12-credit")
async def credit(scene: Scene) -> None:
    """From a CREDIT on a client that offered CREDITS keeps no more requests in flight than that says."""
    names = scene.keys(6)

    async def give_one(session: Session, event: RequestReceived) -> bool:
        if event.request_id == 1 and Feature.CREDITS in session.connection.features:
            await session.send_credit(requests=1, inflight_bytes=1000)
            return False
        return await _late(session, event)

    async with scene.play(session_type=_Counting) as (client, gateway):
        gateway.script = give_one
        await scene.attempt("EXIST", client.exist(scene.namespace, names[:1]))
        if not any(Feature.CREDITS in session.connection.features for session in gateway.sessions):
            raise NotApplicable("the client does not offer CREDITS")
        calls = [client.exist(scene.namespace, [name]) for name in names]
        for found in await scene.together("EXIST", calls):
            expect_true_or_error("EXIST with a small credit", [NOT_FOUND], found)
        for session in gateway.sessions:
            assert isinstance(session, _Counting)
            if session.most_open > 1:
                raise Broken(f"requests in flight: expected 1 at most, got {session.most_open}")


@CONDUCT.clause("5.2-parts")
async def parts(scene: Scene) -> None:
    """Statuses that come in several frames, in any order, are put in their places."""
    names = scene.keys(9)

    async def in_parts(session: Session, event: RequestReceived) -> bool:
        if not isinstance(event.message, Exist):
            return False
        statuses = bytes(key > names[3] for key in event.message.keys)
        for first in reversed(range(0, len(statuses), 3)):
            reply = ExistReply(first=first, statuses=statuses[first : first + 3])
            await session.send_reply(event.request_id, reply, is_final=not first)
        return True

    async with scene.play() as (client, gateway):
        gateway.script = in_parts
        found = await scene.attempt("EXIST", client.exist(scene.namespace, names))
        expect_statuses("EXIST answered in parts", [OK] * 4 + [NOT_FOUND] * 5, found)


@CONDUCT.clause("5.2-twice")
async def twice(scene: Scene) -> None:
    """A frame that answers an item again is a violation: it is not believed, and ends the connection."""

    async def answer(session: Part, event: RequestReceived) -> None:
        await session.say(event, ExistReply(statuses=b"\1\1\1"), is_final=False)
        await session.say(event, ExistReply(first=1, statuses=bytes(2)))

    await _expect_disbelief(scene, answer)


@CONDUCT.clause("5.2-short")
async def short(scene: Scene) -> None:
    """A final reply that leaves items unanswered is a violation."""

    async def answer(session: Part, event: RequestReceived) -> None:
        await session.say(event, ExistReply(statuses=bytes(2)))

    await _expect_disbelief(scene, answer)


@CONDUCT.clause("3.3-unknown-id")
async def unknown_id(scene: Scene) -> None:
    """A reply that names no open request is a violation."""

    async def answer(session: Part, event: RequestReceived) -> None:
        await session.say(event, ExistReply(statuses=bytes(3)), request_id=event.request_id + 1000)

    await _expect_disbelief(scene, answer)


@CONDUCT.clause("3.3-answered-again")
async def answered_again(scene: Scene) -> None:
    """A second answer to a request is a violation, and never the answer to the next one."""
    absent, there = scene.keys(2)

    async def answer_twice(session: Part, event: RequestReceived) -> None:
        for _ in range(2):
            await session.say(event, ExistReply(statuses=b"\1"))

    async with scene.play() as (client, gateway):
        gateway.put(scene.namespace, there, b"there")
        gateway.script = _liar(Exist, answer_twice)
        found = await scene.attempt("EXIST", client.exist(scene.namespace, [absent]))
        expect_true_or_error("EXIST that is answered twice", [NOT_FOUND], found)
        found = await scene.attempt("EXIST", client.exist(scene.namespace, [there]))
        expect_true_or_error("the next EXIST", [OK], found)
        await scene.until_over(gateway.sessions[0])
        found = await scene.attempt("EXIST", client.exist(scene.namespace, [there]))
        expect_statuses("EXIST after that", [OK], found)


@CONDUCT.clause("3.3-another-verb")
async def another_verb(scene: Scene) -> None:
    """A reply to another verb than was asked is a violation."""

    async def answer(session: Part, event: RequestReceived) -> None:
        await session.say(event, Pong(nonce=0), opcode=Opcode.PING)

    await _expect_disbelief(scene, answer)


@CONDUCT.clause("3.1-checksums")
async def checksums(scene: Scene) -> None:
    """A frame whose header or body does not match its CRC is a violation."""

    async def damage_header(session: Part, event: RequestReceived) -> None:
        await session.say(event, ExistReply(statuses=bytes(3)), header_crc=1)

    async def damage_body(session: Part, event: RequestReceived) -> None:
        await session.say(event, ExistReply(statuses=bytes(3)), body_crc=1)

    await _expect_disbelief(scene, damage_header)
    await _expect_disbelief(scene, damage_body)


@CONDUCT.clause("3.1-garbage")
async def garbage(scene: Scene) -> None:
    """Bytes that are no frame are a violation."""

    async def answer(session: Part, event: RequestReceived) -> None:
        await session.transport.send([b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n\0\0\0"])

    await _expect_disbelief(scene, answer)


async def _expect_disbelief(scene: Scene, answer: Lie) -> None:
    """An EXIST of what is not there is answered so on the first connection. It must not make anything exist,
    and must end that connection; on the next one everything is right."""
    async with scene.play() as (client, gateway):
        gateway.script = _liar(Exist, answer)
        found = await scene.attempt("EXIST", client.exist(scene.namespace, scene.keys(3)))
        expect_true_or_error("EXIST answered against the protocol", [NOT_FOUND] * 3, found)
        await scene.until_over(gateway.sessions[0])
        found = await scene.attempt("EXIST", client.exist(scene.namespace, scene.keys(3)))
        expect_statuses("EXIST after that", [NOT_FOUND] * 3, found)


@CONDUCT.clause("5.2-overloaded")
async def overloaded(scene: Scene) -> None:
    """A refused request is not a violation: it is not taken for an answer, and the connection goes on."""
    (key,) = scene.keys(1)
    refused: list[int] = []

    async def refuse(session: Session, event: RequestReceived) -> bool:
        if not isinstance(event.message, Exist) or refused:
            return False
        refused.append(event.request_id)
        reply = ExistReply(status=ErrorCode.OVERLOADED, retry_after_ms=10)
        await session.send_reply(event.request_id, reply)
        return True

    async with scene.play() as (client, gateway):
        gateway.put(scene.namespace, key, b"there")
        gateway.script = refuse
        found = await scene.attempt("EXIST", client.exist(scene.namespace, [key]))
        if found is not None and list(found) not in ([OK], [ErrorCode.OVERLOADED]):
            raise Broken(f"EXIST that was refused: expected an error, OVERLOADED or OK, got {shown(found)}")
        found = await scene.attempt("EXIST", client.exist(scene.namespace, [key]))
        expect_statuses("EXIST after a refusal", [OK], found)
        expect("connections", 1, len(gateway.sessions))


@CONDUCT.clause("5.3-deadline")
async def deadline(scene: Scene) -> None:
    """An EXIST that is not answered ends its connection; the next is asked on another."""
    silent, other = scene.keys(2)
    async with scene.play() as (client, gateway):

        async def say_nothing(session: Part, event: RequestReceived) -> None:
            gateway.put(scene.namespace, other, b"there")

        gateway.script = _liar(Exist, say_nothing)
        found = await scene.attempt("EXIST", client.exist(scene.namespace, [silent]))
        expect_true_or_error("EXIST that is not answered", [NOT_FOUND], found)
        await scene.until_over(gateway.sessions[0])
        found = await scene.attempt("EXIST", client.exist(scene.namespace, [other]))
        expect_statuses("the next EXIST", [OK], found)


# ---------------------------------------------------------------- objects


@CONDUCT.clause("5.5-write")
async def write(scene: Scene) -> None:
    """What is written arrives byte for byte under its checksum, empty or above a frame."""
    names = scene.keys(4)
    objects = [content(10, 1), b"", content(5000, 2), content(1, 3)]
    async with scene.play(limits=Limits(max_payload_bytes=999)) as (client, gateway):
        found = await scene.attempt("WRITE", client.write(scene.namespace, names, objects))
        expect_statuses("WRITE", [OK] * 4, found)
        for name, data in zip(names, objects, strict=True):
            stored = gateway.objects[scene.namespace, name]
            expect("the object that arrived", data, stored.data)
            expect("the checksum that arrived", checksum_of(data), stored.checksum)


@CONDUCT.clause("5.4-any-order")
async def any_order(scene: Scene) -> None:
    """Objects that come in several frames, cut and in any order, are whole and in their places."""
    objects = {key: content(100 * number, number) for number, key in enumerate(scene.keys(4)[1:], 1)}

    async def answer(session: Session, event: RequestReceived) -> bool:
        if not isinstance(event.message, Read):
            return False
        pieces: list[tuple[ReadItem, bytes]] = []
        for index, key in reversed(list(enumerate(event.message.keys))):
            data = objects[key]
            half = len(data) // 3
            item = ReadItem(index=index, object_bytes=len(data), length=half, checksum=checksum_of(data))
            pieces.insert(0, (item, data[:half]))
            pieces.append((attrs.evolve(item, offset=half, length=len(data) - half), data[half:]))
        for number, (item, piece) in enumerate(pieces, 1):
            is_final = number == len(pieces)
            await session.send_reply(event.request_id, ReadReply(items=(item,)), [piece], is_final=is_final)
        return True

    async with scene.play() as (client, gateway):
        gateway.script = answer
        found = await scene.attempt("READ", client.read(scene.namespace, list(objects), [300] * 3))
        expect("READ in pieces", list(objects.values()), None if found is None else list(found))


@CONDUCT.clause("5.4-misses")
async def misses(scene: Scene) -> None:
    """What is not there, or larger than the memory for it, is no object; its neighbours are."""
    names = scene.keys(3)
    async with scene.play() as (client, gateway):
        gateway.put(scene.namespace, names[1], content(100))
        gateway.put(scene.namespace, names[2], content(101))
        found = await scene.attempt("READ", client.read(scene.namespace, names, [100] * 3))
        expect(
            "READ of a miss, an object, and one too large", [None, content(100), None], found and list(found)
        )


@CONDUCT.clause("5.4-wrong-checksum")
async def wrong_checksum(scene: Scene) -> None:
    """Bytes that do not match their checksum are never handed out."""
    bad, good = scene.keys(2)
    async with scene.play(verifies=False) as (client, gateway):
        gateway.put(scene.namespace, bad, content(500, 1), checksum=checksum_of(content(500, 1)) ^ 1)
        gateway.put(scene.namespace, good, content(500, 2))
        found = await scene.attempt("READ", client.read(scene.namespace, [bad, good], [500] * 2))
        expect_true_or_error("READ of a damaged object and a whole one", [None, content(500, 2)], found)


@CONDUCT.clause("5.4-check")
async def check(scene: Scene) -> None:
    """A client that verifies end to end sends CHECK for an object that came damaged."""
    (bad,) = scene.keys(1)
    async with scene.play(features=Feature.FRAGMENTS | Feature.END_TO_END) as (client, gateway):
        gateway.put(scene.namespace, bad, content(500), checksum=1)
        await scene.attempt("READ", client.read(scene.namespace, [bad], [500]))
        if not any(session.hello.features & Feature.END_TO_END for session in gateway.sessions):
            raise NotApplicable("the client does not offer END_TO_END")
        await scene.until(
            "CHECK of the damaged object",
            lambda: any(bad in request.message.keys for request in requests_of(gateway, Check)),  # type: ignore[union-attr]
        )


@CONDUCT.clause("5.4-above-capacity")
async def above_capacity(scene: Scene) -> None:
    """An object that is larger than the memory offered for it is a violation: its bytes go nowhere."""

    async def answer(session: Part, event: RequestReceived) -> None:
        data = content(600, 9)
        item = ReadItem(index=0, object_bytes=600, length=600, checksum=checksum_of(data))
        await session.say(event, ReadReply(items=(item,)), data)

    await _expect_true_object(scene, answer)


@CONDUCT.clause("5.4-does-not-continue")
async def does_not_continue(scene: Scene) -> None:
    """A piece of an object that does not continue where the one before ended is a violation."""

    async def answer(session: Part, event: RequestReceived) -> None:
        data = content(500)
        first = ReadItem(index=0, object_bytes=500, length=300, checksum=checksum_of(data))
        other = attrs.evolve(first, offset=200)
        await session.say(event, ReadReply(items=(first,)), data[:300], is_final=False)
        await session.say(event, ReadReply(items=(other,)), data[200:])

    await _expect_true_object(scene, answer)


@CONDUCT.clause("5.4-ended-item")
async def ended_item(scene: Scene) -> None:
    """An object that has begun and ends with another status is no object."""
    (key,) = scene.keys(1)

    async def answer(session: Part, event: RequestReceived) -> None:
        data = content(500)
        first = ReadItem(index=0, object_bytes=500, length=300, checksum=checksum_of(data))
        await session.send_reply(event.request_id, ReadReply(items=(first,)), [data[:300]], is_final=False)
        last = ReadItem(index=0, status=ErrorCode.CORRUPT)
        await session.send_reply(event.request_id, ReadReply(items=(last,)))

    async with scene.play() as (client, gateway):
        gateway.script = _liar(Read, answer)
        found = await scene.attempt("READ", client.read(scene.namespace, [key], [500]))
        expect_true_or_error("READ of an object that ended early", [None], found)


@CONDUCT.clause("5.4-cut")
async def cut(scene: Scene) -> None:
    """Of an object whose connection ends in the middle, at whichever byte, nothing is handed out."""
    data = content(500)
    reply = ReadReply(items=(ReadItem(index=0, object_bytes=500, length=500, checksum=checksum_of(data)),))
    for at in (0, 16, 32, 60, 80, 300, 579):

        async def answer(session: Part, event: RequestReceived, at: int = at) -> None:
            raw = session.connection.reply(event.request_id, reply)
            await session.transport.send([(raw + data)[:at]])
            session.transport.abort()

        await _expect_true_object(scene, answer)


async def _expect_true_object(scene: Scene, answer: Lie) -> None:
    """A READ is answered so on the first connection. The client must end that connection, and may ask again
    on another; what it hands out is the object that is stored, or none."""
    (key,) = scene.keys(1)
    async with scene.play() as (client, gateway):
        gateway.put(scene.namespace, key, content(500))
        gateway.script = _liar(Read, answer)
        found = await scene.attempt("READ", client.read(scene.namespace, [key], [500]))
        if found is not None and list(found) not in ([content(500)], [None]):
            raise Broken(f"READ: expected the object that is stored, or none, got {shown(list(found))}")
        if found is not None and found[0] is not None and len(gateway.sessions) < 2:
            raise Broken("READ: expected no object from a reply that breaks the protocol, got one")
        await scene.until_over(gateway.sessions[0])
        found = await scene.attempt("READ", client.read(scene.namespace, [key], [500]))
        expect("READ after that", [content(500)], None if found is None else list(found))


# ---------------------------------------------------------------- lost connections, and the end


async def _succeeds(scene: Scene, verb: str, call: Awaitable[Sequence[int] | None]) -> bool:
    scene.awaits = f"{verb} to raise"
    try:
        statuses = await call
    except Exception:  # whatever a client raises is its way to say no
        return False
    return not any(statuses or ())


async def _expect_once(scene: Scene, kind: type, verb: str) -> None:
    """A request of this kind whose connection is lost is not sent again, and its caller is told."""
    (key,) = scene.keys(1)

    async def lose(session: Session, event: RequestReceived) -> bool:
        if isinstance(event.message, kind):
            session.transport.abort()
            return True
        return False

    async with scene.play() as (client, gateway):
        await scene.attempt("EXIST", client.exist(scene.namespace, [key]))
        gateway.script = lose
        if await _succeeds(
            scene, verb, client.delete(scene.namespace, [key]) if kind is Delete else client.fence()
        ):
            raise Broken(f"{verb} whose connection was lost: expected an error, got success")
        gateway.script = None
        found = await scene.attempt("EXIST", client.exist(scene.namespace, [key]))
        expect_statuses("EXIST on another connection", [NOT_FOUND], found)
        await anyio.sleep(QUIET_SECONDS)
        expect(f"{verb} requests, over all connections", 1, len(requests_of(gateway, kind)))


@CONDUCT.clause("7.5-delete-once")
async def delete_once(scene: Scene) -> None:
    """A DELETE whose connection was lost is not repeated, and its caller is told."""
    await _expect_once(scene, Delete, "DELETE")


@CONDUCT.clause("7.5-fence-once")
async def fence_once(scene: Scene) -> None:
    """A FENCE whose connection was lost is not repeated, and its caller is told."""
    await _expect_once(scene, Fence, "FENCE")


@CONDUCT.clause("5.11-drain")
async def drain(scene: Scene) -> None:
    """After the gateway's GOODBYE a client asks nothing more there, takes its answers, and leaves."""
    names = scene.keys(2)

    async def drain_first(session: Part, event: RequestReceived) -> None:
        await session.send_goodbye()
        await session.answer(event)

    async with scene.play() as (client, gateway):
        gateway.script = _liar(Exist, drain_first)
        found = await scene.attempt("EXIST", client.exist(scene.namespace, names[:1]))
        expect_true_or_error("EXIST that crossed a GOODBYE", [NOT_FOUND], found)
        found = await scene.attempt("EXIST", client.exist(scene.namespace, names))
        expect_statuses("EXIST after the gateway's GOODBYE", [NOT_FOUND] * 2, found)
        expect("requests on the connection that drains", ["EXIST"], asked(gateway.sessions[0]))
        await scene.until_over(gateway.sessions[0])
        _expect_last_goodbye(gateway, 0)


@CONDUCT.clause("5.11-goodbye")
async def goodbye(scene: Scene) -> None:
    """A client that leaves says GOODBYE, as its last request."""
    async with scene.play() as (client, gateway):
        await scene.attempt("EXIST", client.exist(scene.namespace, scene.keys(1)))
    if not gateway.sessions:
        raise Broken("expected a client that connects, got none")
    _expect_last_goodbye(gateway, -1)


def _expect_last_goodbye(gateway: MemoryGateway, which: int) -> None:
    requests = gateway.sessions[which].requests
    last = type(requests[-1].message).__name__.upper() if requests else "nothing"
    expect("the last request of a client that leaves", "GOODBYE", last)
