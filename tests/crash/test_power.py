"""A part of `python -m crash power`, and that it would notice a store that breaks the contract."""

import attrs
import pytest

from adp_gateway.store import files, transfer
from adp_gateway.store.journal import Journal
from crash.power import PowerReport, Recorded, Workload, cut_everywhere, record

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

WORKLOADS = {
    "roomy": Workload(seed=1, durability="durable", is_roomy=True, has_quotas=False, rounds=5),
    "tight": Workload(seed=2, durability="durable", is_roomy=False, has_quotas=False, rounds=9),
    "quotas": Workload(seed=3, durability="durable", is_roomy=False, has_quotas=True, rounds=7),
    "relaxed": Workload(seed=4, durability="relaxed", is_roomy=False, has_quotas=False, rounds=9),
}
CUTS = 150


async def cut(recorded: Recorded, **options: int) -> PowerReport:
    report = PowerReport(recorded.workload.seed)
    step = max(1, 3 * recorded.count // CUTS)
    with recorded.device:
        await cut_everywhere(report, recorded, most=10**6, step=step, **options)
    return report


@pytest.mark.parametrize("kind", WORKLOADS)
async def test_power_cuts_lose_nothing_and_bring_nothing_back(kind):
    recorded = await record(WORKLOADS[kind])
    report = await cut(recorded)
    assert report.problems.texts == []
    assert report.cuts >= CUTS * 3 // 4
    assert report.found > 100
    assert (kind == "relaxed") or report.second_cuts > 20


@pytest.mark.parametrize("forgotten", ["data", "journal", "names", "kills"])
async def test_a_store_that_forgets_a_sync_is_found(forgotten, monkeypatch):
    """The checks can fail: without any one of the syncs that `durable` rests on, they do."""
    with monkeypatch.context() as patch:
        if forgotten == "journal":
            patch.setattr(Journal, "sync", lambda _self: None)
        elif forgotten == "names":
            create = files.create_files
            patch.setattr(
                "adp_gateway.store.segments.create_files",
                lambda device, segment_id, layout, _is_durable: create(device, segment_id, layout, False),
            )
        elif forgotten == "kills":
            append = files.append_kills
            patch.setattr(
                "adp_gateway.store.segments.append_kills", lambda work, _is_durable: append(work, False)
            )
        else:
            commit = transfer.Transfers.commit

            def hasty(self, target, records, statuses):
                return commit(self, attrs.evolve(target, data=_Unsynced(target.data)), records, statuses)

            patch.setattr(transfer.Transfers, "commit", hasty)
        recorded = await record(WORKLOADS["roomy"])
    report = await cut(recorded)
    assert report.problems.counts.keys() & ({"phantom"} if forgotten == "kills" else {"lost", "corrupt"})


class _Unsynced:
    """A data file whose sync does nothing."""

    def __init__(self, file) -> None:
        self._file = file

    def sync(self) -> None:
        pass

    def __getattr__(self, name: str):
        return getattr(self._file, name)
