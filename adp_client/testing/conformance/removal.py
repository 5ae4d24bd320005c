"""Sections 5.6 and 5.7: DELETE and CHECK."""

import anyio

from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import Check, Delete, Read

from .clause import Chapter, expect
from .peer import Peer
from .trial import Trial, content

REMOVAL: Chapter[Trial] = Chapter()

OK, NOT_FOUND = ErrorCode.OK, ErrorCode.NOT_FOUND

#: More than a gateway, and the sockets on the way, can hold for a reader that takes nothing.
HELD_BYTES = 64 << 20
_LEAST_BYTES = 32 << 20
_POLL_SECONDS = 0.005


async def hold_read(trial: Trial, peer: Peer, key: bytes) -> tuple[int, bytes, int]:
    """A READ that has begun and cannot end, as nobody takes its bytes: its id, the object, how often."""
    size = min(1 << 20, trial.largest_bytes)
    count = min(HELD_BYTES, trial.limits.max_inflight_bytes) // size
    count = min(count, trial.limits.max_items)
    trial.need(
        count * size >= _LEAST_BYTES,
        f"no READ has more than {count * size} bytes, which may all fit the sockets' buffers",
    )
    data = content(size, 9)
    await trial.store(peer, [(key, data)])
    message = Read(namespace=trial.namespace, keys=(key,) * count, capacities=(size,) * count)
    request_id = await peer.ask(message)
    await peer.first_bytes()
    return request_id, data, count


async def until_absent(trial: Trial, peer: Peer, key: bytes) -> None:
    """Ask until the object is not there; the clause's deadline ends it."""
    while await trial.exist(peer, [key]) != [NOT_FOUND]:
        peer.awaits = "an object whose DELETE was sent to be gone"
        await anyio.sleep(_POLL_SECONDS)


@REMOVAL.clause("5.6-delete")
async def delete(trial: Trial) -> None:
    """DELETE says OK of what was there and NOT_FOUND of what was not; afterwards it is gone."""
    keys = trial.keys(4)
    peer = await trial.connect()
    await trial.store(peer, [(key, content(100)) for key in keys[:2]])
    expect("DELETE", [OK, NOT_FOUND], await trial.delete(peer, [keys[0], keys[2]]))
    expect("EXIST after DELETE", [NOT_FOUND, OK], await trial.exist(peer, keys[:2]))
    await trial.expect_objects(peer, [(keys[0], None), (keys[1], content(100))])
    expect("DELETE again", [NOT_FOUND], await trial.delete(peer, keys[:1]))
    await trial.store(peer, [(keys[0], content(50, 3))])
    await trial.expect_objects(peer, [(keys[0], content(50, 3))])


@REMOVAL.clause("5.6-waits-for-reads")
async def waits_for_reads(trial: Trial) -> None:
    """DELETE is answered when every READ that had started has ended, with its bytes; later ones miss."""
    (key,) = trial.keys(1)
    reader, deleter, other = [await trial.connect() for _ in range(3)]
    read_id, data, count = await hold_read(trial, reader, key)
    delete_id = await deleter.ask(Delete(namespace=trial.namespace, keys=(key,)))
    await until_absent(trial, other, key)
    await trial.expect_silence(deleter, delete_id, "to DELETE while a READ of the object is under way")
    await trial.expect_objects(other, [(key, None)])
    objects = (await reader.answer(read_id)).objects()
    expect("objects of the READ that had started", [True] * count, [found == data for found in objects])
    expect("DELETE after that READ", [OK], (await deleter.answer(delete_id)).statuses)


@REMOVAL.clause("5.6-reader-lost")
async def reader_lost(trial: Trial) -> None:
    """A READ whose connection is lost has ended: it holds up no DELETE."""
    (key,) = trial.keys(1)
    reader, deleter = await trial.connect(), await trial.connect()
    await hold_read(trial, reader, key)
    delete_id = await deleter.ask(Delete(namespace=trial.namespace, keys=(key,)))
    await reader.transport.aclose()
    expect("DELETE after its reader was lost", [OK], (await deleter.answer(delete_id)).statuses)


@REMOVAL.clause("5.7-check")
async def check(trial: Trial) -> None:
    """CHECK says OK of what is whole and NOT_FOUND of what is not there, and drops nothing that is whole."""
    there, absent, empty = trial.keys(3)
    data = content(min(5000, trial.largest_bytes))
    peer = await trial.connect()
    await trial.store(peer, [(there, data), (empty, b"")])
    answer = await peer.call(Check(namespace=trial.namespace, keys=(there, absent, empty)))
    expect("CHECK", [OK, NOT_FOUND, OK], answer.statuses)
    await trial.expect_objects(peer, [(there, data), (absent, None), (empty, b"")])
