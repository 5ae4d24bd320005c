"""A worker's half: translates vLLM's jobs for `Transfers`.

vLLM asserts that every transfer succeeded, so success is what it hears. A store that was refused is only
counted: what the gateway holds is what it says it holds. A load that failed is remembered for our connector,
which reports it in the same step (`take_failed_loads`).
"""

import logging
import struct
from collections import Counter
from typing import TYPE_CHECKING

import attrs
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
    get_offload_group_idx,
)

from adp_engines.copies import copies_for
from adp_engines.staging import Region, slot_bytes_for
from adp_engines.transfers import Pages, Transfers
from adp_engines.vllm import _compat

from .spec import LoadSource, StoreTarget

if TYPE_CHECKING:
    from .spec import ADPOffloadingSpec

logger = logging.getLogger("vllm.adp")

#: How long the engine's thread waits for copies inside this host. Only a bug takes longer.
_SETTLE_SECONDS = 10.0
_DRAIN_SECONDS = 2.0
_SHARD = struct.Struct(">I")


class ADPOffloadingWorker(OffloadingWorker):
    """See the module. Called by vLLM from the worker's main thread."""

    def __init__(self, spec: "ADPOffloadingSpec", kv_caches: CanonicalKVCaches) -> None:
        if any(canonical.tensor.device.type == "cpu" for canonical in kv_caches.tensors):
            _compat.let_attention_use_tiles()
        self.geometry = spec.geometry(kv_caches)
        self._shard = _SHARD.pack(spec.shard)
        self._failed_loads: set[int] = set()
        self._told_counters: Counter[str] = Counter()
        slot_bytes = slot_bytes_for(max(self.geometry.object_bytes))
        rank = spec.config.parallel.rank
        self.transfers = Transfers(
            geometry=self.geometry,
            copies=copies_for(self.geometry, [canonical.tensor for canonical in kv_caches.tensors]),
            region=Region.create(
                slots=max(1, spec.settings.store_staging_bytes // slot_bytes),
                slot_bytes=slot_bytes,
                label="adp-stores",
            ),
            connect=spec.connect,
            store_seconds=spec.settings.store_seconds,
            name=f"adp-worker{rank}",
        )

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Accept a store; always True, at once."""
        assert isinstance(dst_spec, StoreTarget)
        self.transfers.submit_store(
            job_id,
            _pages(src_spec),
            dst_spec.namespace,
            tuple(key + self._shard for key in dst_spec.keys),
            _groups(dst_spec.keys),
        )
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **_later: object
    ) -> bool:
        """Accept a load; always True, at once. Later vLLMs say more about a load than this worker needs."""
        assert isinstance(src_spec, LoadSource)
        (shard,) = _SHARD.unpack(self._shard)
        self.transfers.submit_load(
            job_id,
            _pages(dst_spec),
            src_spec.region,
            tuple(slots[shard] for slots in src_spec.slots),
            _groups(src_spec.keys),
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended, each once, every one called a success."""
        results = []
        for done in self.transfers.take_done():
            if done.is_failed:
                self._failed_loads.add(done.job_id)
            results.append(
                TransferResult(
                    job_id=done.job_id,
                    success=True,
                    transfer_size=done.moved_bytes,
                    transfer_time=done.seconds,
                )
            )
        return results

    def take_failed_loads(self) -> set[int]:
        """Loads among the results of the last `get_finished` calls that did not arrive."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def take_counted(self) -> Counter[str]:
        """What was counted since the last call, by event."""
        counters = Counter(attrs.asdict(self.transfers.counters))
        increases = counters - self._told_counters
        self._told_counters = counters
        return increases

    def wait(self, job_ids: set[int]) -> None:
        """Return when the pages of these jobs may be reused. Never waits for the network; ignores unknown
        ids."""
        if late := self.transfers.wait_settled(job_ids, _SETTLE_SECONDS):
            logger.error(
                "adp: copies of jobs %s did not end within %s s; what they stored is dropped",
                late,
                _SETTLE_SECONDS,
            )

    def shutdown(self) -> None:
        """Stop; stores that were copied out get two seconds to reach the gateway."""
        self.transfers.close(drain_seconds=_DRAIN_SECONDS)


def _pages(spec: GPULoadStoreSpec) -> Pages:
    return Pages(
        group_sizes=tuple(spec.group_sizes),
        first_indices=tuple(spec.block_indices),
        block_ids=tuple(spec.block_ids.tolist()),
    )


def _groups(keys: tuple[bytes, ...]) -> tuple[int, ...]:
    return tuple(get_offload_group_idx(key) for key in keys)
