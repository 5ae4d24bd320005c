"""Section 3: frames. A damaged, foreign or impossible one ends its own connection, with the right code."""

from adp_client.protocol.constants import ErrorCode, Flag, Opcode
from adp_client.protocol.messages import Exist, Ping

from .clause import Chapter, expect
from .frames import frame, ping_frame, vector, write_item
from .peer import checksum_of
from .trial import Trial, content

FRAMING: Chapter[Trial] = Chapter()
_U32 = 0xFFFFFFFF


@FRAMING.clause("3.1-magic")
async def magic(trial: Trial) -> None:
    """A frame that does not begin with `ADP/` is BAD_MAGIC."""
    peer = await trial.connect()
    await trial.expect_violation(peer, ping_frame(1, magic=b"ADQ/"), ErrorCode.BAD_MAGIC)


@FRAMING.clause("3.1-other-protocol")
async def other_protocol(trial: Trial) -> None:
    """What another protocol says instead of HELLO is BAD_MAGIC."""
    cases = {"HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "TLS": b"\x16\x03\x01\x02\0\1" + bytes(64)}
    await trial.expect_violations(cases, ErrorCode.BAD_MAGIC, is_greeted=False)


@FRAMING.clause("3.1-version")
async def version(trial: Trial) -> None:
    """A header of another version is UNSUPPORTED_VERSION."""
    peer = await trial.connect()
    await trial.expect_violation(peer, ping_frame(1, version=9), ErrorCode.UNSUPPORTED_VERSION)


@FRAMING.clause("3.1-header-checksum")
async def header_checksum(trial: Trial) -> None:
    """A header whose CRC does not match is BAD_CHECKSUM."""
    peer = await trial.connect()
    await trial.expect_violation(peer, ping_frame(1, header_crc=1), ErrorCode.BAD_CHECKSUM)


@FRAMING.clause("3.1-opcode")
async def opcode(trial: Trial) -> None:
    """An opcode that nobody has defined is UNKNOWN_OPCODE."""
    cases = {f"opcode {number}": frame(number, bytes(8)) for number in (0, 200)}
    await trial.expect_violations(cases, ErrorCode.UNKNOWN_OPCODE)


@FRAMING.clause("3.1-body-limit")
async def body_limit(trial: Trial) -> None:
    """A body above the gateway's limit is LIMIT_EXCEEDED, before a byte of it has come."""
    size = trial.limits.max_body_bytes + 1
    trial.need(size <= _U32, "the gateway takes every body that a header can announce")
    peer = await trial.connect()
    raw = frame(Opcode.PING, body_bytes=size, body_crc=1)
    await trial.expect_violation(peer, raw, ErrorCode.LIMIT_EXCEEDED)


@FRAMING.clause("3.1-payload-limit")
async def payload_limit(trial: Trial) -> None:
    """A payload above the gateway's limit is LIMIT_EXCEEDED, before a byte of it has come."""
    size = trial.limits.max_payload_bytes + 1
    trial.need(size <= _U32, "the gateway takes every payload that a header can announce")
    peer = await trial.connect()
    raw = frame(Opcode.WRITE, payload_bytes=size)
    await trial.expect_violation(peer, raw, ErrorCode.LIMIT_EXCEEDED)


@FRAMING.clause("3.1-body-checksum")
async def body_checksum(trial: Trial) -> None:
    """A body whose CRC does not match is BAD_CHECKSUM."""
    peer = await trial.connect()
    await trial.expect_violation(peer, ping_frame(1, body_crc=1), ErrorCode.BAD_CHECKSUM)


@FRAMING.clause("3.1-order-of-checks")
async def order_of_checks(trial: Trial) -> None:
    """Of several faults in one frame, the one that section 3.1 names first is told."""
    faults = (
        (
            "magic and the rest",
            frame(200, bytes(8), magic=b"HTTP", version=9, header_crc=1),
            ErrorCode.BAD_MAGIC,
        ),
        (
            "version and the rest",
            frame(200, bytes(8), version=9, header_crc=1),
            ErrorCode.UNSUPPORTED_VERSION,
        ),
        ("checksum and the rest", frame(200, bytes(8), flags=0x80, header_crc=1), ErrorCode.BAD_CHECKSUM),
        ("opcode and flags", frame(200, bytes(8), flags=0x80, body_crc=1), ErrorCode.UNKNOWN_OPCODE),
        ("flags and size", ping_frame(1, flags=0x80, body_bytes=_U32, body_crc=1), ErrorCode.MALFORMED),
        ("body checksum and body", frame(Opcode.EXIST, bytes(3), body_crc=1), ErrorCode.BAD_CHECKSUM),
        ("body and state", frame(Opcode.HELLO, bytes(3), request_id=0), ErrorCode.MALFORMED),
    )
    peers = [await trial.connect() for _ in faults]
    for peer, (_, raw, _) in zip(peers, faults, strict=True):
        await peer.send(raw)
    for peer, (name, _, code) in zip(peers, faults, strict=True):
        await trial.expect_error(peer, code, subject=f"{name}: ")


@FRAMING.clause("3.1-body-too-short")
async def body_too_short(trial: Trial) -> None:
    """A body that ends inside a field is MALFORMED."""
    peer = await trial.connect()
    await trial.expect_violation(peer, frame(Opcode.PING, bytes(7)), ErrorCode.MALFORMED)


@FRAMING.clause("3.1-body-too-long")
async def body_too_long(trial: Trial) -> None:
    """A body with bytes behind its last field is MALFORMED."""
    cases = {
        "PING of 9 bytes": frame(Opcode.PING, bytes(9)),
        "FENCE of 1 byte": frame(Opcode.FENCE, bytes(1)),
    }
    await trial.expect_violations(cases, ErrorCode.MALFORMED)


@FRAMING.clause("3.1-reserved")
async def reserved(trial: Trial) -> None:
    """A reserved field that is not zero is MALFORMED."""
    keys = trial.keys(1)
    item = write_item(1, 0, 1, checksum_of(b"x"), reserved=1)
    cases = {
        "behind the key bytes": frame(Opcode.EXIST, vector(trial.namespace, keys, reserved=1)),
        "behind the argument": frame(Opcode.EXIST, vector(trial.namespace, keys, reserved2=1)),
        "in a write item": frame(Opcode.WRITE, vector(trial.namespace, keys) + item, payload_bytes=1) + b"x",
    }
    await trial.expect_violations(cases, ErrorCode.MALFORMED)


@FRAMING.clause("3.1-payload-size")
async def payload_size(trial: Trial) -> None:
    """A WRITE whose payload is not the sum of its items' lengths is MALFORMED, and stores nothing."""
    (key,) = trial.keys(1)
    data = content(10)
    body = vector(trial.namespace, [key]) + write_item(10, 0, 10, checksum_of(data))
    cases = {
        f"{size} bytes of payload for 10": frame(Opcode.WRITE, body, payload_bytes=size)
        + data[:size].ljust(size, b"x")
        for size in (9, 11)
    }
    await trial.expect_violations(cases, ErrorCode.MALFORMED)
    expect("EXIST afterwards", [ErrorCode.NOT_FOUND], await trial.exist(await trial.connect(), [key]))


@FRAMING.clause("3.1-payload-where-none-belongs")
async def payload_where_none_belongs(trial: Trial) -> None:
    """Payload behind a request other than WRITE is MALFORMED."""
    peer = await trial.connect()
    raw = ping_frame(1, payload_bytes=8) + bytes(8)
    await trial.expect_violation(peer, raw, ErrorCode.MALFORMED)


@FRAMING.clause("3.1-bytes-one-by-one")
async def bytes_one_by_one(trial: Trial) -> None:
    """Where the stream cuts a frame means nothing: bytes that come one by one are the same frame."""
    (key,) = trial.keys(1)
    peer = await trial.connect()
    request_id, raw = peer.say(Exist(namespace=trial.namespace, keys=(key,)))
    for at in range(len(raw)):
        await peer.send(raw[at : at + 1])
    expect("EXIST, byte by byte", [ErrorCode.NOT_FOUND], (await peer.answer(request_id)).statuses)


@FRAMING.clause("3.1-frames-together")
async def frames_together(trial: Trial) -> None:
    """Frames that come together are each answered."""
    peer = await trial.connect()
    count = min(20, trial.limits.max_requests)
    said = [peer.say(Ping(nonce=nonce)) for nonce in range(count)]
    await peer.send(b"".join(raw for _, raw in said))
    for nonce, (request_id, _) in enumerate(said):
        await peer.pong(request_id, nonce)


@FRAMING.clause("3.2-flags")
async def flags(trial: Trial) -> None:
    """A flag that nobody has defined is MALFORMED."""
    cases = {f"flags {bits:#06x}": ping_frame(1, flags=bits) for bits in (0x4, 0x8000)}
    await trial.expect_violations(cases, ErrorCode.MALFORMED)


@FRAMING.clause("3.2-more")
async def more(trial: Trial) -> None:
    """MORE on a request that may not span frames is a violation."""
    cases = {
        "EXIST with MORE": frame(Opcode.EXIST, vector(trial.namespace, trial.keys(1)), flags=Flag.MORE),
        "PING with MORE": ping_frame(1, flags=Flag.MORE),
    }
    await trial.expect_violations(cases, ErrorCode.MALFORMED, ErrorCode.UNEXPECTED_MESSAGE)


@FRAMING.clause("3.2-reply")
async def reply(trial: Trial) -> None:
    """A reply sent to a gateway is an UNEXPECTED_MESSAGE."""
    peer = await trial.connect()
    raw = ping_frame(1, flags=Flag.REPLY)
    await trial.expect_violation(peer, raw, ErrorCode.UNEXPECTED_MESSAGE)


@FRAMING.clause("3.2-frames-alternate")
async def frames_alternate(trial: Trial) -> None:
    """Frames of different messages may alternate: two WRITEs and an EXIST among each other are all done."""
    size = min(3000, trial.largest_bytes)
    trial.need(size >= 3 and trial.limits.max_requests >= 3, "the gateway's limits are too small")
    one, other = trial.keys(2)
    objects = {one: content(size, 1), other: content(size, 2)}
    peer = await trial.connect()
    cuts = {key: trial.frames_of([(key, data)], size // 3) for key, data in objects.items()}
    ids: dict[bytes, int | None] = dict.fromkeys(objects)
    for number, pair in enumerate(zip(cuts[one], cuts[other], strict=True), 1):
        for key, part in zip(objects, pair, strict=True):
            ids[key], raw = peer.say(part.message, request_id=ids[key], is_final=number == len(cuts[one]))
            await peer.send(raw, *part.parts)
        if number == 1:
            absent = trial.keys(3)[2:]
            expect("EXIST between their frames", [ErrorCode.NOT_FOUND], await trial.exist(peer, absent))
    for request_id in ids.values():
        assert request_id is not None
        expect("a WRITE among others", [ErrorCode.OK], (await peer.answer(request_id)).statuses)
    await trial.expect_objects(peer, list(objects.items()))


@FRAMING.clause("3.3-id-twice")
async def id_twice(trial: Trial) -> None:
    """A request id that has been used is an UNEXPECTED_MESSAGE, also after its reply."""
    peer = await trial.connect()
    await trial.ping(peer)
    await trial.expect_violation(peer, ping_frame(1), ErrorCode.UNEXPECTED_MESSAGE)


@FRAMING.clause("3.3-id-zero")
async def id_zero(trial: Trial) -> None:
    """A request with the id 0 is an UNEXPECTED_MESSAGE; so is a GOODBYE, which is a request of a client."""
    cases = {
        "PING with the id 0": ping_frame(0),
        "GOODBYE with the id 0": frame(Opcode.GOODBYE, bytes(8), request_id=0),
    }
    await trial.expect_violations(cases, ErrorCode.UNEXPECTED_MESSAGE)


@FRAMING.clause("7.3-others-go-on")
async def others_go_on(trial: Trial) -> None:
    """A violation ends its own connection: what others have stored and what they have under way stays."""
    stored, begun, lost = trial.keys(3)
    data, size = content(1000, 1), min(2000, trial.largest_bytes)
    other, violator = await trial.connect(), await trial.connect()
    await trial.store(other, [(stored, data)])
    whole = [(begun, content(size, 2))]
    cut = trial.frames_of(whole, size // 2)
    request_id, raw = other.say(cut[0].message, is_final=False)
    await other.send(raw, *cut[0].parts)
    await trial.begin_write(violator, [(lost, content(size, 3))], frame_bytes=size // 2, frames=1)
    await violator.send(b"not a frame at all, nor the beginning of one")
    await trial.expect_error(violator, ErrorCode.BAD_MAGIC)
    for number, part in enumerate(cut[1:], 2):
        _, raw = other.say(part.message, request_id=request_id, is_final=number == len(cut))
        await other.send(raw, *part.parts)
    answered = (await other.answer(request_id)).statuses
    expect("a WRITE that was under way elsewhere", [ErrorCode.OK], answered)
    await trial.expect_objects(other, [(stored, data), *whole, (lost, None)])


@FRAMING.clause("7.3-nothing-after")
async def nothing_after(trial: Trial) -> None:
    """What a violator sends behind its violation is not done."""
    (key,) = trial.keys(1)
    peer = await trial.connect()
    data = content(100)
    body = vector(trial.namespace, [key]) + write_item(100, 0, 100, checksum_of(data))
    write = frame(Opcode.WRITE, body, request_id=2, payload_bytes=100) + data
    await peer.send(ping_frame(1, header_crc=1) + write)
    trial.will_remove(key)
    await peer.ended()
    found = await trial.exist(await trial.connect(), [key])
    expect("EXIST of an object that was written behind a violation", [ErrorCode.NOT_FOUND], found)
