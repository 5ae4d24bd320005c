"""A part of `python -m crash damage`, and that it would notice a store that believes its disk."""

import random

import attrs
import pytest

from adp_gateway.store.base import Status
from adp_gateway.store.transfer import Transfers
from crash.damage import OTHERS, DamageReport, Files, examine, flip
from crash.power import Recorded, Workload, record

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

TIGHT = Workload(seed=12, durability="relaxed", is_roomy=False, has_quotas=False, rounds=10)
ROOMY = attrs.evolve(TIGHT, is_roomy=True, rounds=6)


async def damage(recorded: Recorded, way, times: int) -> DamageReport:
    report, source = DamageReport(0), random.Random(f"{recorded.workload.seed}")
    with recorded.device:
        files = recorded.device.contents()
    for _ in range(times):
        damaged: Files = {name: bytearray(contents) for name, contents in files.items()}
        what = way(damaged, source)
        await examine(report, recorded.workload, damaged, recorded.history, what, is_flip=way is flip)
    return report


@pytest.mark.parametrize("workload", [TIGHT, ROOMY], ids=["tight", "roomy"])
async def test_b43_a_flipped_bit_costs_at_most_the_object_that_it_is_in(workload):
    report = await damage(await record(workload), flip, 150)
    assert report.problems.texts == []
    assert report.passed
    assert report.repaired > 20
    assert report.corrupt_items > 5


@pytest.mark.parametrize("way", OTHERS, ids=lambda way: way.__name__)
async def test_b43_other_damage_is_a_miss_and_never_another_s_bytes(way):
    report = await damage(await record(TIGHT), way, 40)
    assert report.problems.texts == []
    assert report.found > 0


async def test_a_store_that_believes_its_disk_is_found(monkeypatch):
    recorded = await record(TIGHT)
    real = Transfers.read_into

    def believing(self, sources, buffers, *, progress):
        progress.statuses[:] = bytes([Status.OK]) * len(real(self, sources, buffers, progress=progress))
        return bytes(progress.statuses)

    monkeypatch.setattr(Transfers, "read_into", believing)
    report = await damage(recorded, flip, 150)
    assert report.problems.counts.keys() & {"half", "corrupt"}
