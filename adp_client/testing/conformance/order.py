"""Sections 5.8 to 5.11 and 7.4: what runs beside what, what waits for what, the window, the end."""

from adp_client.protocol.constants import ErrorCode, Opcode
from adp_client.protocol.messages import (
    Delete,
    Exist,
    Fence,
    Goodbye,
    Ping,
    Read,
    StatusReply,
    Write,
    WriteItem,
)

from .clause import Chapter, expect
from .frames import frame, ping_frame, vector
from .peer import Peer, checksum_of
from .trial import Trial, content

ORDER: Chapter[Trial] = Chapter()

OK, NOT_FOUND = ErrorCode.OK, ErrorCode.NOT_FOUND
_U32 = 0xFFFFFFFF


async def _begin(trial: Trial, peer: Peer, key: bytes, data: bytes) -> tuple[int, list[bytes]]:
    """A WRITE of which one frame is sent: its id, and the parts of the rest, to be sent later."""
    cut = trial.frames_of([(key, data)], (len(data) + 1) // 2)
    request_id: int | None = None
    parts: list[bytes] = []
    for number, each in enumerate(cut, 1):
        request_id, raw = peer.say(each.message, request_id=request_id, is_final=number == len(cut))
        if number == 1:
            await peer.send(raw, *each.parts)
        else:
            parts += [raw, *each.parts]
    assert request_id is not None
    return request_id, parts


@ORDER.clause("5.8-fence")
async def fence(trial: Trial) -> None:
    """What is asked behind a FENCE sees what was asked before it, without waiting for a reply."""
    trial.need(trial.limits.max_requests >= 7, "the window takes fewer than seven requests")
    (key,) = trial.keys(1)
    data = content(min(3000, trial.largest_bytes))
    peer = await trial.connect()
    items = (WriteItem(object_bytes=len(data), length=len(data), checksum=checksum_of(data)),)
    keyed = {"namespace": trial.namespace, "keys": (key,)}
    trial.will_remove(key)
    said = [
        peer.say(message)
        for message in (
            Write(**keyed, items=items),  # type: ignore[arg-type]
            Fence(),
            Read(**keyed, capacities=(len(data),)),  # type: ignore[arg-type]
            Fence(),
            Delete(**keyed),  # type: ignore[arg-type]
            Fence(),
            Exist(**keyed),  # type: ignore[arg-type]
        )
    ]
    await peer.send(said[0][1], data, *(raw for _, raw in said[1:]))
    answers = [await peer.answer(request_id) for request_id, _ in said]
    expect("READ behind WRITE and FENCE", [data], answers[2].objects())
    expect("DELETE behind a FENCE", [OK], answers[4].statuses)
    expect("EXIST behind DELETE and FENCE", [NOT_FOUND], answers[6].statuses)
    expect("the reply to FENCE", [StatusReply()], answers[1].frames)


@ORDER.clause("5.8-fence-waits")
async def fence_waits(trial: Trial) -> None:
    """FENCE is answered, and what is behind it begins, when a WRITE that began before it is done."""
    trial.need(trial.limits.max_requests >= 3, "the window takes fewer than three requests")
    (key,) = trial.keys(1)
    data = content(min(2000, trial.largest_bytes))
    peer = await trial.connect()
    write_id, rest = await _begin(trial, peer, key, data)
    fence_id = await peer.ask(Fence())
    exist_id = await peer.ask(Exist(namespace=trial.namespace, keys=(key,)))
    await trial.expect_silence(peer, fence_id, "to FENCE while a WRITE before it is unfinished")
    await trial.expect_silence(peer, exist_id, "to EXIST behind a FENCE that has not been reached")
    await peer.send(*rest)
    expect("WRITE", [OK], (await peer.answer(write_id)).statuses)
    await peer.answer(fence_id)
    expect("EXIST behind WRITE and FENCE", [OK], (await peer.answer(exist_id)).statuses)


@ORDER.clause("5.9-side-by-side")
async def side_by_side(trial: Trial) -> None:
    """Requests of a connection run side by side: a WRITE that is not finished holds up nothing else."""
    trial.need(trial.limits.max_requests >= 2, "the window takes one request")
    begun, there = trial.keys(2)
    data = content(min(2000, trial.largest_bytes))
    peer = await trial.connect()
    await trial.store(peer, [(there, data)])
    write_id, rest = await _begin(trial, peer, begun, data)
    expect("EXIST beside a WRITE", [OK], await trial.exist(peer, [there]))
    expect("READ beside a WRITE", [data], await trial.read(peer, [there], capacity=len(data)))
    await trial.ping(peer)
    await peer.send(*rest)
    expect("WRITE", [OK], (await peer.answer(write_id)).statuses)


@ORDER.clause("5.10-ping")
async def ping(trial: Trial) -> None:
    """PING is answered with its nonce, whatever that is."""
    peer = await trial.connect()
    for nonce in (0, 1, 0x0123_4567_89AB_CDEF, 2**64 - 1):
        await trial.ping(peer, nonce)


@ORDER.clause("5.11-goodbye")
async def goodbye(trial: Trial) -> None:
    """GOODBYE is answered when everything else that was asked has been, and then the connection ends."""
    trial.need(trial.limits.max_requests >= 4, "the window takes fewer than four requests")
    keys = trial.keys(min(8, trial.limits.max_items))
    data = content(min(20_000, trial.largest_bytes))
    peer = await trial.connect(max_payload_bytes=4000)
    for key in keys:
        await trial.store(peer, [(key, data)])
    said = [
        peer.say(message)
        for message in (
            Read(namespace=trial.namespace, keys=keys, capacities=(len(data),) * len(keys)),
            Exist(namespace=trial.namespace, keys=keys),
            Ping(nonce=3),
            Goodbye(),
        )
    ]
    await peer.send(b"".join(raw for _, raw in said))
    ids = [request_id for request_id, _ in said]
    answers = [await peer.answer(request_id) for request_id in (ids[3], *ids[:3])]
    expect("the request that is answered last", ids[3], peer.order[-1])
    expect("READ before GOODBYE", [data] * len(keys), answers[1].objects())
    expect("what is said after the reply to GOODBYE", None, await peer.ended())


@ORDER.clause("5.11-error")
async def error(trial: Trial) -> None:
    """A client that says ERROR is gone: the connection ends."""
    peer = await trial.connect()
    await peer.send(peer.connection.error(ErrorCode.MALFORMED, "this is a test"))
    expect("what is said to a client that has said ERROR", None, await peer.ended())


@ORDER.clause("5.11-reason")
async def reason(trial: Trial) -> None:
    """A GOODBYE whose reason is cut short is MALFORMED."""
    cases = {
        "7 bytes of a reason": frame(Opcode.GOODBYE, bytes(7)),
        "3 bytes of a text of 5": frame(Opcode.GOODBYE, bytes(4) + b"\5\0\0\0abc"),
    }
    await trial.expect_violations(cases, ErrorCode.MALFORMED)


@ORDER.clause("7.4-requests")
async def requests(trial: Trial) -> None:
    """A request above `max requests` in flight is LIMIT_EXCEEDED."""
    count = trial.limits.max_requests
    trial.need(
        count <= 10_000 and 2 * count <= trial.limits.max_inflight_bytes,
        "the window takes more than ten thousand requests",
    )
    trial.need(trial.largest_bytes >= 2, "no object can span frames")
    peer = await trial.connect()
    raw = bytearray()
    for key in trial.keys(count):
        items = (WriteItem(object_bytes=2, length=1, checksum=1),)
        message = Write(namespace=trial.namespace, keys=(key,), items=items)
        raw += peer.say(message, is_final=False)[1] + b"x"
    await peer.send(bytes(raw))
    await trial.expect_violation(peer, ping_frame(peer.next_id), ErrorCode.LIMIT_EXCEEDED)


@ORDER.clause("7.4-bytes")
async def inflight_bytes(trial: Trial) -> None:
    """A request that takes more than `max inflight bytes` is LIMIT_EXCEEDED."""
    total = trial.limits.max_inflight_bytes + 1
    count = -(-total // _U32)
    trial.need(count <= trial.limits.max_items, "no request within the other limits fills the window")
    peer = await trial.connect()
    body = vector(trial.namespace, trial.keys(count))
    body += b"".join(size.to_bytes(4, "little") for size in _shares(total, count))
    trial.need(
        len(body) <= trial.limits.max_body_bytes, "no request within the other limits fills the window"
    )
    await trial.expect_violation(peer, frame(Opcode.READ, body), ErrorCode.LIMIT_EXCEEDED)


@ORDER.clause("7.4-freed")
async def freed(trial: Trial) -> None:
    """The whole window may be used, and is free again when the request has its final reply."""
    total = trial.limits.max_inflight_bytes
    count = -(-total // _U32)
    trial.need(
        count <= trial.limits.max_items and 48 + 20 * count <= trial.limits.max_body_bytes,
        "no request within the other limits fills the window",
    )
    peer = await trial.connect()
    keys = trial.keys(count)
    for _ in range(3):
        message = Read(namespace=trial.namespace, keys=keys, capacities=tuple(_shares(total, count)))
        statuses = (await peer.call(message)).statuses
        expect("READ that offers the whole window", [NOT_FOUND] * count, statuses)
    for _ in range(min(trial.limits.max_requests, 1000) + 1):
        await trial.ping(peer)


def _shares(total: int, count: int) -> list[int]:
    """`total`, in `count` numbers of 32 bits."""
    return [min(_U32, max(0, total - _U32 * at)) for at in range(count)]
