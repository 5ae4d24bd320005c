"""Sections 5.3 and 5.12, feature LEASES: what EXIST called OK under a lease stays until the lease ends."""

import anyio
import attrs

from adp_client.protocol.constants import ErrorCode, Feature
from adp_client.protocol.messages import Delete, Exist, ExistReply, Fence, Release

from .clause import Broken, Chapter, Level, expect
from .peer import Peer
from .trial import Trial, content

LEASES: Chapter[Trial] = Chapter()

OK, NOT_FOUND, STALE_EPOCH = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.STALE_EPOCH
_ASKED_MS = 30_000
_POLL_SECONDS = 0.005


@attrs.frozen
class Lease:
    """As it was granted."""

    id: int
    milliseconds: int
    statuses: list[ErrorCode]


async def _connect(trial: Trial) -> Peer:
    return await trial.connect(features=Feature.FRAGMENTS | Feature.LEASES)


async def _lease(trial: Trial, peer: Peer, *keys: bytes, ask_ms: int = _ASKED_MS) -> Lease:
    """EXIST with a lease, which must be granted."""
    answer = await peer.call(Exist(namespace=trial.namespace, keys=keys, lease_ms=ask_ms))
    statuses = answer.statuses
    granted = {
        (frame.lease_id, frame.lease_ms)
        for frame in answer.frames
        if isinstance(frame, ExistReply) and frame.lease_id
    }
    if len(granted) != 1:
        raise Broken(f"EXIST that asks for a lease on what is there: expected one lease, got {len(granted)}")
    ((lease_id, lease_ms),) = granted
    if not 0 < lease_ms <= trial.limits.max_lease_ms:
        raise Broken(f"lease ms: expected 1 to {trial.limits.max_lease_ms}, got {lease_ms}")
    return Lease(lease_id, lease_ms, statuses)


async def _release(peer: Peer, *lease_ids: int) -> list[ErrorCode]:
    return (await peer.call(Release(lease_ids=lease_ids))).statuses


@LEASES.clause("5.3-lease", level=Level.FULL, needs=Feature.LEASES)
async def lease(trial: Trial) -> None:
    """EXIST that asks for a lease is granted one on what is there, for no longer than the maximum."""
    there, absent = trial.keys(2)
    peer = await _connect(trial)
    await trial.store(peer, [(there, content(100))])
    for ask_ms in (1000, 0xFFFFFFFF):
        granted = await _lease(trial, peer, there, absent, ask_ms=ask_ms)
        expect("EXIST with a lease", [OK, NOT_FOUND], granted.statuses)
        expect("RELEASE", [OK], await _release(peer, granted.id))


@LEASES.clause("5.12-release", level=Level.FULL, needs=Feature.LEASES)
async def release(trial: Trial) -> None:
    """RELEASE is OK once; of a lease that has ended, or never was, it is STALE_EPOCH."""
    (key,) = trial.keys(1)
    peer = await _connect(trial)
    await trial.store(peer, [(key, content(100))])
    one, other = [await _lease(trial, peer, key) for _ in range(2)]
    if one.id == other.id:
        raise Broken(f"a second lease: expected an id of its own, got {other.id} again")
    unknown = (one.id ^ other.id) + (1 << 62)
    expect("RELEASE of one and of none", [OK, STALE_EPOCH], await _release(peer, one.id, unknown))
    expect("RELEASE again", [STALE_EPOCH, OK], await _release(peer, one.id, other.id))


@LEASES.clause("5.12-release-foreign", level=Level.FULL, needs=Feature.LEASES)
async def release_foreign(trial: Trial) -> None:
    """RELEASE of another connection's lease is STALE_EPOCH, and that lease goes on."""
    (key,) = trial.keys(1)
    holder, other = await _connect(trial), await _connect(trial)
    await trial.store(holder, [(key, content(100))])
    granted = await _lease(trial, holder, key)
    expect("RELEASE of a foreign lease", [STALE_EPOCH], await _release(other, granted.id))
    expect("RELEASE by its holder", [OK], await _release(holder, granted.id))


@LEASES.clause("5.3-lease-holds", level=Level.FULL, needs=Feature.LEASES)
async def lease_holds(trial: Trial) -> None:
    """What is leased is not deleted until the lease is released; a READ under the lease gets it meanwhile."""
    (key,) = trial.keys(1)
    data = content(1000)
    holder, other = await _connect(trial), await _connect(trial)
    await trial.store(holder, [(key, data)])
    granted = await _lease(trial, holder, key)
    delete_id = await other.ask(Delete(namespace=trial.namespace, keys=(key,)))
    await trial.expect_silence(other, delete_id, "to DELETE of a leased object")
    expect("READ under the lease", [data], await trial.read(holder, [key], capacity=1000))
    expect("RELEASE", [OK], await _release(holder, granted.id))
    expect("DELETE after the lease", [OK], (await other.answer(delete_id)).statuses)
    expect("EXIST after the DELETE", [NOT_FOUND], await trial.exist(holder, [key]))


@LEASES.clause("5.3-lease-covers-all", level=Level.FULL, needs=Feature.LEASES)
async def lease_covers_all(trial: Trial) -> None:
    """A lease is on everything that its EXIST called OK, and not only on the first of it."""
    keys = trial.keys(min(10, trial.limits.max_items, trial.limits.max_requests))
    holder, other = await _connect(trial), await _connect(trial)
    await trial.store(holder, [(key, content(100, number)) for number, key in enumerate(keys)])
    granted = await _lease(trial, holder, *keys)
    expect("EXIST with a lease", [OK] * len(keys), granted.statuses)
    delete_ids = [await other.ask(Delete(namespace=trial.namespace, keys=(key,))) for key in keys]
    await trial.expect_silence(other, delete_ids[-1], f"to DELETE of the last of {len(keys)} leased objects")
    early = [number for number, delete_id in enumerate(delete_ids) if other.is_answered(delete_id)]
    expect(f"which of {len(keys)} leased objects a DELETE was answered for", [], early)
    expect("RELEASE", [OK], await _release(holder, granted.id))
    for delete_id in delete_ids:
        expect("DELETE after the lease", [OK], (await other.answer(delete_id)).statuses)


@LEASES.clause("5.3-lease-write", level=Level.FULL, needs=Feature.LEASES)
async def lease_write(trial: Trial) -> None:
    """A WRITE of a leased key is taken and replaces the object; the lease goes on."""
    (key,) = trial.keys(1)
    holder, other = await _connect(trial), await _connect(trial)
    await trial.store(holder, [(key, content(100))])
    granted = await _lease(trial, holder, key)
    for number, (who, peer) in enumerate((("another connection", other), ("its holder", holder)), 1):
        new = content(100 + number, number)
        expect(f"WRITE of a leased key by {who}", [OK], await trial.write(peer, [(key, new)]))
        expect(f"READ after a WRITE by {who}", [new], await trial.read(holder, [key], capacity=1000))
    delete_id = await other.ask(Delete(namespace=trial.namespace, keys=(key,)))
    await trial.expect_silence(other, delete_id, "to DELETE of an object that was written under a lease")
    expect("RELEASE", [OK], await _release(holder, granted.id))
    expect("DELETE after the lease", [OK], (await other.answer(delete_id)).statuses)


@LEASES.clause("5.3-lease-not-while-deleted", level=Level.FULL, needs=Feature.LEASES)
async def lease_not_while_deleted(trial: Trial) -> None:
    """What a DELETE waits for is NOT_FOUND for an EXIST that asks for a lease, and is not in that lease."""
    claimed, free = trial.keys(2)
    holder, deleter, late = [await _connect(trial) for _ in range(3)]
    await trial.store(holder, [(claimed, content(100)), (free, content(100))])
    granted = await _lease(trial, holder, claimed)
    delete_id = await deleter.ask(Delete(namespace=trial.namespace, keys=(claimed,)))
    # Nothing says when the DELETE has come; a lease that was granted before that is given back.
    while (second := await _lease(trial, late, claimed, free)).statuses != [NOT_FOUND, OK]:
        expect("EXIST with a lease", [OK, OK], second.statuses)
        expect("RELEASE", [OK], await _release(late, second.id))
        late.awaits = "NOT_FOUND from an EXIST with a lease, of an object whose DELETE waits"
        await anyio.sleep(_POLL_SECONDS)
    expect("EXIST without a lease", [OK], await trial.exist(late, [claimed]))
    expect("RELEASE", [OK], await _release(holder, granted.id))
    expect("DELETE beside a later lease", [OK], (await deleter.answer(delete_id)).statuses)
    expect("RELEASE of the later lease", [OK], await _release(late, second.id))


@LEASES.clause("5.12-release-at-once", level=Level.FULL, needs=Feature.LEASES)
async def release_at_once(trial: Trial) -> None:
    """RELEASE is answered at once, also behind a FENCE that waits for a DELETE that waits for that lease."""
    trial.need(trial.limits.max_requests >= 3, "the window takes fewer than three requests")
    (key,) = trial.keys(1)
    holder = await _connect(trial)
    await trial.store(holder, [(key, content(100))])
    granted = await _lease(trial, holder, key)
    delete_id = await holder.ask(Delete(namespace=trial.namespace, keys=(key,)))
    fence_id = await holder.ask(Fence())
    await trial.expect_silence(holder, fence_id, "to FENCE while a DELETE before it waits for a lease")
    expect("RELEASE behind a FENCE that waits", [OK], await _release(holder, granted.id))
    expect("DELETE after its own lease", [OK], (await holder.answer(delete_id)).statuses)
    await holder.answer(fence_id)


@LEASES.clause("5.3-lease-ends-with-connection", level=Level.FULL, needs=Feature.LEASES)
async def lease_ends_with_connection(trial: Trial) -> None:
    """A lease ends with its connection."""
    (key,) = trial.keys(1)
    holder, other = await _connect(trial), await _connect(trial)
    await trial.store(holder, [(key, content(100))])
    await _lease(trial, holder, key)
    delete_id = await other.ask(Delete(namespace=trial.namespace, keys=(key,)))
    await trial.expect_silence(other, delete_id, "to DELETE of a leased object")
    await holder.transport.aclose()
    expect("DELETE after the holder was lost", [OK], (await other.answer(delete_id)).statuses)


@LEASES.clause("5.3-lease-runs-out", level=Level.FULL, needs=Feature.LEASES)
async def lease_runs_out(trial: Trial) -> None:
    """A lease ends when it has run for its time: it holds up nothing more, and its RELEASE is STALE_EPOCH."""
    (key,) = trial.keys(1)
    holder, other = await _connect(trial), await _connect(trial)
    await trial.store(holder, [(key, content(100))])
    granted = await _lease(trial, holder, key, ask_ms=50)
    expect("DELETE when the lease has run out", [OK], await trial.delete(other, [key]))
    expect("RELEASE when the lease has run out", [STALE_EPOCH], await _release(holder, granted.id))
