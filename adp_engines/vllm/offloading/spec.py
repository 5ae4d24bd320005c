"""The spec: vLLM makes one in the scheduler and one in every worker, and asks it for the half that belongs
there."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LoadStoreSpec,
    OffloadingCounterMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from adp_client.protocol.errors import ConfigError
from adp_engines.errors import StartupRefused
from adp_engines.gateway import client_factory
from adp_engines.geometry import Geometry, LayerRef, Tensor
from adp_engines.namespace import Identity
from adp_engines.staging import RegionName
from adp_engines.vllm.plugin import CONNECTOR_NAME

from . import door


@attrs.frozen(kw_only=True)
class EngineView:
    """What our connector knows and vLLM does not tell a spec."""

    vllm_config: Any
    kv_cache_config: Any


EVENTS_METRIC = "vllm:adp_events"

_view: ContextVar[EngineView | None] = ContextVar("adp_engine_view", default=None)


@contextmanager
def seen_by(view: EngineView) -> Iterator[None]:
    """While this is open, specs made in this thread know the whole engine."""
    token = _view.set(view)
    try:
        yield
    finally:
        _view.reset(token)


class StoreTarget(LoadStoreSpec):
    """Where the objects of a store job go: a namespace, and one chunk key an object, without the shard."""

    def __init__(self, namespace: bytes, keys: tuple[bytes, ...]) -> None:
        self.namespace = namespace
        self.keys = keys


class LoadSource(LoadStoreSpec):
    """Where the objects of a load job lie: in the scheduler's staging region, verified.

    `slots[k][s]` holds shard `s` of chunk `keys[k]`. `region` is None when the engine asked for a chunk that
    was never verified: such a job must fail without touching a block. `ticket` names the pin that keeps the
    slots as they are.
    """

    def __init__(
        self,
        ticket: int,
        region: RegionName | None,
        keys: tuple[bytes, ...],
        slots: tuple[tuple[int, ...], ...],
    ) -> None:
        self.ticket = ticket
        self.region = region
        self.keys = keys
        self.slots = slots


class ADPOffloadingSpec(OffloadingSpec):
    """Offloading to an ADP gateway. Made by vLLM from the names in its configuration."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        try:
            self.settings = door.settings(dict(self.extra_config))
            self.view = _view.get()
            if self.view is None and self.settings.model_id is None:
                raise StartupRefused(
                    "vLLM's own OffloadingConnector does not tell which weights it runs:"
                    f" name them @ $.adp.model_id, or use {CONNECTOR_NAME}"
                )
        except ConfigError as error:
            refusal = StartupRefused("; ".join(error.problems))
            door.tell(refusal)
            raise refusal from error
        except StartupRefused as refusal:
            door.tell(refusal)
            raise
        # Ranks that hold the same bytes store them once: vLLM then gives store jobs to rank 0 only.
        self.replicated_layout = config.replicated_layout
        self.connect = client_factory(self.settings)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """One counter, by event: the names are the fields of catalogue.Counters and TransferCounters."""
        return {
            EVENTS_METRIC: OffloadingCounterMetadata(
                documentation="What became of chunks looked up, loaded and stored by ADP, and why.",
                labelnames=("event",),
            )
        }

    @property
    def shards(self) -> int:
        """Objects a chunk: one a rank, or a single one where all ranks hold the same bytes."""
        return 1 if self.replicated_layout else self.config.parallel.world_size

    @property
    def shard(self) -> int:
        """This rank's shard."""
        return 0 if self.replicated_layout else self.config.parallel.rank

    def identity(self) -> Identity:
        """What the namespace is made of, before the workers have told their layouts."""
        from adp_engines.vllm.identity import describe, describe_without_engine

        if self.view is None:
            return describe_without_engine(self.config)
        return describe(
            self.view.vllm_config,
            self.view.kv_cache_config,
            blocks_per_chunk=self.config.cache.blocks_per_chunk,
            tokens_per_hash=self.config.cache.tokens_per_hash,
            model_id=self.settings.model_id,
        )

    def geometry(self, kv_caches: CanonicalKVCaches) -> Geometry:
        """The objects of this rank, from the tensors that vLLM hands over."""
        return Geometry.from_description(
            [
                Tensor(
                    blocks=canonical.tensor.shape[0],
                    row_bytes=canonical.tensor[0].numel() * canonical.tensor.element_size(),
                    stride_bytes=canonical.tensor.stride(0) * canonical.tensor.element_size(),
                )
                for canonical in kv_caches.tensors
            ],
            [
                [LayerRef(tensor=ref.tensor_idx, page_bytes=ref.page_size_bytes) for ref in refs]
                for refs in kv_caches.group_data_refs
            ],
            blocks_per_chunk=self.config.cache.blocks_per_chunk,
            layer_names=[group.layer_names for group in self.config.groups],
        )

    def get_manager(self) -> OffloadingManager:
        """The scheduler's half."""
        from .manager import ADPOffloadingManager

        manager = ADPOffloadingManager(self)
        if self.view is None:
            # vLLM's own connector has no call at which the workers' layouts are known.
            manager.open()
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """A worker's half."""
        from .worker import ADPOffloadingWorker

        try:
            return ADPOffloadingWorker(self, kv_caches)
        except StartupRefused as refusal:
            door.tell(refusal)
            raise
