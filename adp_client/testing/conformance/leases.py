"""Sections 5.3 and 5.12, feature LEASES: what EXIST called OK under a lease stays until the lease ends."""

import attrs

from adp_client.protocol.constants import ErrorCode, Feature
from adp_client.protocol.messages import Delete, Exist, ExistReply, Release

from .clause import Broken, Chapter, Level, expect
from .peer import Peer
from .trial import Trial, content

LEASES: Chapter[Trial] = Chapter()

OK, NOT_FOUND, STALE_EPOCH = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.STALE_EPOCH
_ASKED_MS = 30_000


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
