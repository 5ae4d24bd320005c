"""Section 5.5: WRITE. Whole or not at all, whatever happens to the connection."""

from adp_client.protocol.constants import ErrorCode, Feature, Flag, Opcode
from adp_client.protocol.messages import Read, Write, WriteItem

from .clause import Broken, Chapter, expect
from .frames import frame, vector, write_item
from .peer import Peer, checksum_of
from .trial import Trial, content

WRITING: Chapter[Trial] = Chapter()

OK, NOT_FOUND, CORRUPT = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.CORRUPT


@WRITING.clause("5.5-overwrite")
async def overwrite(trial: Trial) -> None:
    """A WRITE of a key that is there replaces the object as a whole: also a longer one by a shorter one."""
    (key,) = trial.keys(1)
    peer = await trial.connect()
    for number, size in enumerate((1000, 10, 0, 500)):
        new = (key, content(min(size, trial.largest_bytes), number))
        await trial.store(peer, [new])
        await trial.expect_objects(peer, [new])


@WRITING.clause("5.5-corrupt")
async def corrupt(trial: Trial) -> None:
    """An object whose bytes do not match its checksum is CORRUPT and not stored; its neighbours are."""
    good, bad, other = trial.keys(3)
    data = content(100)
    rows = [(good, checksum_of(data)), (bad, checksum_of(data) ^ 1), (other, checksum_of(data))]
    peer = await trial.connect()
    trial.will_remove(good, bad, other)
    message = Write(
        namespace=trial.namespace,
        keys=tuple(key for key, _ in rows),
        items=tuple(WriteItem(object_bytes=100, length=100, checksum=checksum) for _, checksum in rows),
    )
    answer = await peer.call(message, [data] * 3)
    expect("WRITE with one wrong checksum", [OK, CORRUPT, OK], answer.statuses)
    expect("EXIST afterwards", [OK, NOT_FOUND, OK], await trial.exist(peer, [good, bad, other]))
    await trial.expect_objects(peer, [(good, data), (bad, None), (other, data)])


@WRITING.clause("5.5-corrupt-over-another")
async def corrupt_over_another(trial: Trial) -> None:
    """Bytes that do not match their checksum do not take the place of an object that is there."""
    (key,) = trial.keys(1)
    before, damaged = content(100, 1), content(100, 2)
    peer = await trial.connect()
    await trial.store(peer, [(key, before)])
    items = (WriteItem(object_bytes=100, length=100, checksum=checksum_of(damaged) ^ 1),)
    answer = await peer.call(Write(namespace=trial.namespace, keys=(key,), items=items), [damaged])
    expect("WRITE with a wrong checksum", [CORRUPT], answer.statuses)
    (found,) = await trial.read(peer, [key])
    if found is not None:
        expect("READ of the object that was there", before, found)


@WRITING.clause("5.5-corrupt-large")
async def corrupt_large(trial: Trial) -> None:
    """A large object is compared with its checksum as well, to the last byte: CORRUPT, and nothing stored."""
    (key,) = trial.keys(1)
    data = content(min(1 << 20, trial.largest_bytes))
    peer = await trial.connect()
    cut = trial.frames_of([(key, data)], trial.limits.max_payload_bytes)
    request_id: int | None = None
    for number, part in enumerate(cut, 1):
        request_id, raw = peer.say(part.message, request_id=request_id, is_final=number == len(cut))
        *before, end = part.parts
        if number == len(cut):
            end = end[:-1] + bytes([end[-1] ^ 1])
        await peer.send(raw, *before, end)
    assert request_id is not None
    expect(
        f"WRITE of {len(data)} bytes, the last of them wrong",
        [CORRUPT],
        (await peer.answer(request_id)).statuses,
    )
    expect("EXIST afterwards", [NOT_FOUND], await trial.exist(peer, [key]))
    await trial.expect_objects(peer, [(key, None)])


@WRITING.clause("5.5-frames")
async def frames(trial: Trial) -> None:
    """A WRITE may span frames, and an object too; the continuation of an object is not an item of its own."""
    size = min(1000, trial.largest_bytes)
    sizes = [size, size // 3, 0, size, 1]
    objects = [(key, content(n, at)) for at, (key, n) in enumerate(zip(trial.keys(5), sizes, strict=True))]
    for frame_bytes in (size, size // 2 + 1, 64):
        peer = await trial.connect()
        found = await trial.write(peer, objects, frame_bytes=frame_bytes)
        expect(f"WRITE in frames of {frame_bytes} bytes", [OK] * 5, found)
        await trial.expect_objects(peer, objects)


@WRITING.clause("5.5-invisible")
async def invisible(trial: Trial) -> None:
    """An object is invisible until its last byte has come, to everybody, and then visible whole."""
    (key,) = trial.keys(1)
    data = content(min(900, trial.largest_bytes))
    peer, other = await trial.connect(), await trial.connect()
    cut = trial.frames_of([(key, data)], len(data) // 3)
    request_id: int | None = None
    for number, part in enumerate(cut, 1):
        request_id, raw = peer.say(part.message, request_id=request_id, is_final=number == len(cut))
        await peer.send(raw, *part.parts)
        if number < len(cut):
            await _expect_nothing(trial, peer, other, key, f"after {number} of {len(cut)} frames")
    assert request_id is not None
    expect("WRITE", [OK], (await peer.answer(request_id)).statuses)
    await trial.expect_objects(other, [(key, data)])


async def _expect_nothing(trial: Trial, peer: Peer, other: Peer, key: bytes, when: str) -> None:
    for each in (peer, other):
        expect(f"EXIST {when} of a WRITE", [NOT_FOUND], await trial.exist(each, [key]))
        expect(f"READ {when} of a WRITE", [None], await trial.read(each, [key]))


@WRITING.clause("5.5-old-until-complete")
async def old_until_complete(trial: Trial) -> None:
    """Who reads while an object is being replaced gets the old one, whole."""
    (key,) = trial.keys(1)
    size = min(900, trial.largest_bytes)
    old, new = content(size, 1), content(size, 2)
    peer, other = await trial.connect(), await trial.connect()
    await trial.store(other, [(key, old)])
    cut = trial.frames_of([(key, new)], size // 2)
    request_id, raw = peer.say(cut[0].message, is_final=False)
    await peer.send(raw, *cut[0].parts)
    await trial.ping(peer)
    await trial.expect_objects(other, [(key, old)])
    for number, part in enumerate(cut[1:], 2):
        _, raw = peer.say(part.message, request_id=request_id, is_final=number == len(cut))
        await peer.send(raw, *part.parts)
    expect("WRITE", [OK], (await peer.answer(request_id)).statuses)
    await trial.expect_objects(other, [(key, new)])


@WRITING.clause("5.5-cut")
async def cut(trial: Trial) -> None:
    """Of an object whose connection ends after some of its frames, or inside one, nothing is ever visible."""
    size = min(900, trial.largest_bytes)
    keys = trial.keys(4)
    for number, key in enumerate(keys[:2], 1):
        peer = await trial.connect()
        await trial.begin_write(peer, [(key, content(size))], frame_bytes=size // 3, frames=number)
        await trial.ping(peer)  # so the gateway has them
        await peer.transport.aclose()
    for at, key in enumerate(keys[2:], 1):
        peer = await trial.connect()
        (whole,) = trial.frames_of([(key, content(size))], size)
        _, raw = peer.say(whole.message)
        await peer.send(raw, whole.parts[0][: -size * at // 3])
        await peer.transport.aclose()
    other = await trial.connect()
    for _ in range(2):
        expect("EXIST of what was cut off", [NOT_FOUND] * 4, await trial.exist(other, keys))
        await trial.expect_objects(other, [(key, None) for key in keys])
    await trial.store(other, [(key, content(size, 5)) for key in keys])
    await trial.expect_objects(other, [(key, content(size, 5)) for key in keys])


@WRITING.clause("5.5-twice-in-one")
async def twice_in_one(trial: Trial) -> None:
    """A key that stands twice in a WRITE is answered twice; what is stored is one of the two, whole."""
    (key,) = trial.keys(1)
    one, other = content(300, 1), content(200, 2)
    peer = await trial.connect()
    expect("WRITE of one key twice", [OK, OK], await trial.write(peer, [(key, one), (key, other)]))
    (found,) = await trial.read(peer, [key])
    if found not in (one, other):
        raise Broken(f"READ of a key that was written twice: expected one of the two, got {found!r}")


@WRITING.clause("5.5-too-large")
async def too_large(trial: Trial) -> None:
    """An object above `max object bytes` is LIMIT_EXCEEDED."""
    size = trial.limits.max_object_bytes + 1
    trial.need(size < 1 << 32, "the gateway takes every object that an item can announce")
    peer = await trial.connect()
    body = vector(trial.namespace, trial.keys(1)) + write_item(size, 0, 1, 1)
    raw = frame(Opcode.WRITE, body, flags=Flag.MORE, payload_bytes=1) + b"x"
    await trial.expect_violation(peer, raw, ErrorCode.LIMIT_EXCEEDED)


@WRITING.clause("4.4-no-fragments")
async def no_fragments(trial: Trial) -> None:
    """A gateway that does not announce FRAGMENTS answers an object above one command with TOO_LARGE."""
    trial.need(not trial.welcome.features & Feature.FRAGMENTS, "the gateway announces FRAGMENTS")
    size = trial.limits.max_command_bytes + 1
    trial.need(size <= trial.limits.max_object_bytes, "one command takes the largest object")
    fits, above = trial.keys(2)
    peer = await trial.connect()
    objects = [(fits, content(size - 1)), (above, content(size))]
    expect("WRITE around max command bytes", [OK, ErrorCode.TOO_LARGE], await trial.write(peer, objects))
    await trial.expect_objects(peer, [objects[0], (above, None)])


@WRITING.clause("5.5-continues-nothing")
async def continues_nothing(trial: Trial) -> None:
    """An item that continues nothing, or not where and what the one before it was, is MALFORMED."""
    key, other = trial.keys(2)
    head = vector(trial.namespace, [key])
    first = frame(Opcode.WRITE, head + write_item(9, 0, 3, 1), flags=Flag.MORE, payload_bytes=3) + b"abc"
    cases = {}
    for name, before, named, row in (
        ("nothing before it", b"", key, write_item(9, 3, 6, 1)),
        ("another key", first, other, write_item(9, 3, 6, 1)),
        ("an offset too low", first, key, write_item(9, 2, 7, 1)),
        ("an offset too high", first, key, write_item(9, 4, 5, 1)),
        ("another size", first, key, write_item(10, 3, 7, 1)),
        ("another checksum", first, key, write_item(9, 3, 6, 2)),
    ):
        length = int.from_bytes(row[8:12], "little")
        body = vector(trial.namespace, [named]) + row
        cases[name] = before + frame(Opcode.WRITE, body, payload_bytes=length) + bytes(length)
    await trial.expect_violations(cases, ErrorCode.MALFORMED)


@WRITING.clause("5.5-unfinished")
async def unfinished(trial: Trial) -> None:
    """A WRITE that ends before its last object, or an item longer than its object, is MALFORMED."""
    head = vector(trial.namespace, trial.keys(1))
    rows = {
        "3 bytes of 9": (write_item(9, 0, 3, 1), 3),
        "9 bytes of 3": (write_item(3, 0, 9, 1), 9),
        "0 bytes of 9": (write_item(9, 0, 0, 1), 0),
    }
    cases = {
        name: frame(Opcode.WRITE, head + row, payload_bytes=length) + bytes(length)
        for name, (row, length) in rows.items()
    }
    await trial.expect_violations(cases, ErrorCode.MALFORMED)


@WRITING.clause("5.9-effects")
async def effects(trial: Trial) -> None:
    """A request that is sent after the reply to another sees its effects, on any connection."""
    one, other = await trial.connect(), await trial.connect()
    (key,) = trial.keys(1)
    for number in range(5):
        data = content(100, number)
        await trial.store(one, [(key, data)])
        answer = await other.call(Read(namespace=trial.namespace, keys=(key,), capacities=(100,)))
        expect("READ on another connection after a WRITE was answered", [data], answer.objects())
        expect("DELETE on another connection", [OK], await trial.delete(other, [key]))
        expect("EXIST after a DELETE was answered", [NOT_FOUND], await trial.exist(one, [key]))
