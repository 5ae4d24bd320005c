"""vLLM's OffloadingConnector, told the whole engine and taught to survive a load that fails after all.

The framework does the planning; this subclass only adds what it has no seam for: the engine's identity for
the spec, each worker's layout for the scheduler, the end of a load for the staging slots that it read, and a
failed load for the engine. It overrides calls of the connector interface and copies none of vLLM's code.
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from adp_engines.errors import StartupRefused
from adp_engines.vllm import _compat

from . import door
from .manager import ADPOffloadingManager, WorkerLayout
from .spec import EngineView, LoadSource, seen_by
from .worker import ADPOffloadingWorker

logger = logging.getLogger("vllm.adp")

_YIELD_SECONDS = 0.0002


@dataclass
class ADPHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once, when its cache exists."""

    rank: int
    digest: str
    object_bytes: tuple[int, ...]
    host: str


@dataclass
class ADPWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's completions of a step, the loads among them that failed on some rank, and what was counted."""

    failed_loads: set[int] = field(default_factory=set)
    counted: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ADPWorkerMetadata":
        """Completions add up; a load that failed on one rank failed on all of them."""
        merged = super().aggregate(other)
        assert isinstance(merged, OffloadingWorkerMetadata)
        assert isinstance(other, ADPWorkerMetadata)
        return ADPWorkerMetadata(
            completed_jobs=merged.completed_jobs,
            transfer_stats=merged.transfer_stats,
            failed_loads=self.failed_loads | other.failed_loads,
            counted=self.counted + other.counted,
        )


@dataclass
class _LoadUnderWay:
    request_id: str
    source: LoadSource
    ranks_left: int
    is_failed: bool = False


class ADPOffloadingConnector(OffloadingConnector):
    """Selected by `"kv_connector": "ADPOffloadingConnector"`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        try:
            _compat.check_version()
            door.prepare(vllm_config.kv_transfer_config)
            if role is KVConnectorRole.SCHEDULER:
                _compat.make_block_hashes_stable(vllm_config.cache_config.prefix_caching_hash_algo)
            with seen_by(EngineView(vllm_config=vllm_config, kv_cache_config=kv_cache_config)):
                super().__init__(vllm_config, role, kv_cache_config)
        except StartupRefused as refusal:
            door.tell(refusal)
            raise
        self._world_size = vllm_config.parallel_config.world_size
        self._rank = vllm_config.parallel_config.rank
        self._group_layers = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        self._pages_inside: list[object] = []
        self._loads: dict[int, _LoadUnderWay] = {}
        self._scheduler: Any = None
        if self.connector_scheduler is not None:
            manager = self._manager
            manager.is_ticketed = True
            manager.trailing_groups = frozenset(
                group.group_idx
                for group in self.connector_scheduler.config.kv_group_configs
                if group.sliding_window_size_in_chunks is not None
            )

    @property
    def _manager(self) -> ADPOffloadingManager:
        assert self.connector_scheduler is not None
        manager = self.connector_scheduler.manager
        assert isinstance(manager, ADPOffloadingManager)
        return manager

    # -- at start: both sides agree on one view of the cache

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Worker: the cache exists. Remember what lies inside its pages, too: equal sizes are not equal
        layouts."""
        self._pages_inside = [
            [_inside_of_page(kv_caches[name]) for name in layers if name in kv_caches]
            for layers in self._group_layers
        ]
        super().register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> ADPHandshake | None:
        """Worker: this rank's layout."""
        if self.connector_worker is None:
            return None
        worker = self.connector_worker.worker
        assert isinstance(worker, ADPOffloadingWorker)
        return ADPHandshake(
            rank=self._rank,
            digest=worker.geometry.digest(self._pages_inside),
            object_bytes=worker.geometry.object_bytes,
            host=_host(),
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Scheduler: every worker's layout is known; open for business, or refuse to start."""
        told = sorted((m for m in metadata.values() if isinstance(m, ADPHandshake)), key=lambda m: m.rank)
        refusal: str | None = None
        if [m.rank for m in told] != list(range(self._world_size)):
            refusal = (
                f"{self._world_size} workers, but ranks {[m.rank for m in told]} told their cache layout"
            )
        elif any(len(m.object_bytes) != len(self._group_layers) for m in told):
            refusal = (
                f"scheduler and workers disagree on the number of KV cache groups ({len(self._group_layers)})"
            )
        elif foreign := [m.rank for m in told if m.host != _host()]:
            refusal = (
                f"workers {foreign} cannot see the scheduler's memory: other host, container or PID namespace"
            )
        if refusal is not None:
            error = StartupRefused(refusal)
            door.tell(error)
            raise error
        self._manager.open(
            [WorkerLayout(rank=m.rank, digest=m.digest, object_bytes=tuple(m.object_bytes)) for m in told]
        )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Scheduler: called from the scheduler's constructor; see `_compat.scheduler_in_construction`."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._scheduler = _compat.scheduler_in_construction()
        if self._scheduler is None:
            error = StartupRefused("cannot reach vLLM's scheduler: a failed load could not be reported")
            door.tell(error)
            raise error

    # -- at run time

    def on_new_request(self, request: Request) -> None:
        """Scheduler: requests of an adapter stay out, block hashes know adapters by their name only."""
        if request.lora_request is not None:
            self._manager.exclude(request.request_id)
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Scheduler: remember which staging slots the step's loads read."""
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, OffloadingConnectorMetadata)
        for job_id, job in meta.load_jobs.items():
            assert isinstance(job.src_spec, LoadSource)
            self._loads[job_id] = _LoadUnderWay(job.req_id, job.src_spec, self._world_size)
        if not scheduler_output.total_num_scheduled_tokens and (self._loads or self._manager.is_waiting):
            # The step runs no model: it only asks again. vLLM's own loop then sleeps for the sake of such
            # threads as ours, except when the engine runs inside the caller's process, where it would spin
            # and hold the GIL.
            time.sleep(_YIELD_SECONDS)
        return meta

    def build_connector_worker_meta(self) -> ADPWorkerMetadata | None:
        """Worker: completions, and the failed loads among them. On all ranks, or `aggregate` loses some."""
        meta = super().build_connector_worker_meta()
        if meta is None:
            return None
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        assert isinstance(worker, ADPOffloadingWorker)
        return ADPWorkerMetadata(
            meta.completed_jobs, meta.transfer_stats, worker.take_failed_loads(), worker.take_counted()
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Scheduler: account for loads that ended on all ranks, before and after vLLM does.

        Also for those from before a cache reset, which vLLM itself ignores.
        """
        meta = connector_output.kv_connector_worker_meta
        ended: list[_LoadUnderWay] = []
        if isinstance(meta, ADPWorkerMetadata):
            self._manager.count_workers(meta.counted)
            for job_id, ranks in meta.completed_jobs.items():
                load = self._loads.get(job_id)
                if load is None:
                    continue
                load.is_failed |= job_id in meta.failed_loads
                load.ranks_left -= ranks
                if load.ranks_left <= 0:
                    ended.append(self._loads.pop(job_id))
        for load in ended:
            if load.is_failed:
                self._manager.distrust(load.source.keys)
        super().update_connector_output(connector_output)
        for load in ended:
            self._manager.release(load.source.ticket)
            if load.is_failed and _compat.fail_restore(self._scheduler, load.request_id):
                logger.warning(
                    "adp: a restore of %d chunks failed; the engine computes them", len(load.source.keys)
                )


def _inside_of_page(cache: torch.Tensor) -> object:
    """The order of values inside a page: dtype and the strides below a block's, in elements."""
    block_stride = max(cache.stride()) if cache.dim() else 1
    return [str(cache.dtype), [[i, s] for i, s in enumerate(cache.stride()) if s < block_stride]]


def _host() -> str:
    """Where a process can be found by its id: this boot of this host, in this PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
