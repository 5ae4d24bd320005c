"""What we rely on in the installed vLLM, and both halves of the adapter driven by hand. No engine starts."""

import inspect
from importlib.metadata import entry_points
from types import SimpleNamespace

import attrs
import pytest

from adp_client.protocol.errors import ConfigError
from adp_engines.config import OffloadingConfig
from adp_engines.errors import StartupRefused, UnsupportedEngine
from adp_engines.geometry import Geometry, LayerRef, Tensor
from engines.fakes import DictGateway
from engines.test_namespace import IDENTITY

from .processes import transfer_config, until

pytest.importorskip("vllm")

import torch
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from adp_engines.copies import copies_for
from adp_engines.geometry import plan_load, plan_store
from adp_engines.staging import Region, slot_bytes_for
from adp_engines.vllm import _compat, plugin
from adp_engines.vllm.offloading import door
from adp_engines.vllm.offloading.connector import ADPOffloadingConnector, ADPWorkerMetadata
from adp_engines.vllm.offloading.manager import ADPOffloadingManager, WorkerLayout
from adp_engines.vllm.offloading.spec import ADPOffloadingSpec, LoadSource
from adp_engines.vllm.offloading.worker import ADPOffloadingWorker

plugin.register()


class TestRegistration:
    def test_entry_point_is_installed(self) -> None:
        (ours,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "adp"]
        assert ours.load() is plugin.register

    def test_plugin_may_run_again(self) -> None:
        plugin.register()
        plugin.register()

    def test_names_lead_to_our_classes(self) -> None:
        config = KVTransferConfig(**transfer_config({}))
        assert KVConnectorFactory.get_connector_class(config) is ADPOffloadingConnector
        assert KVConnectorFactory.supports_hma_config(config)
        assert OffloadingSpecFactory.get_spec_cls({"spec_name": "ADPOffloadingSpec"}) is ADPOffloadingSpec

    @pytest.mark.parametrize(
        "ours", [ADPOffloadingConnector, ADPOffloadingManager, ADPOffloadingWorker, ADPOffloadingSpec]
    )
    def test_overrides_take_what_vllm_passes(self, ours: type) -> None:
        """A public method that overrides one of vLLM's accepts at least its arguments, by the same names."""
        for name, method in vars(ours).items():
            base = next((vars(c)[name] for c in ours.__mro__[1:] if name in vars(c)), None)
            if name.startswith("_") or base is None or not inspect.isfunction(method):
                continue
            theirs, mine = (inspect.signature(f).parameters for f in (base, method))
            takes_any = any(p.kind is p.VAR_KEYWORD for p in mine.values())
            assert takes_any or list(theirs) == list(mine)[: len(theirs)], name
            extra = list(mine.values())[len(theirs) :]
            assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in extra), name


class TestDoor:
    def test_settings_arrive_and_consequences_are_settled(self) -> None:
        config = KVTransferConfig(**transfer_config({"staging_bytes": 8192}, blocks_per_chunk=2))
        assert door.prepare(config).staging_bytes == 8192
        assert config.kv_load_failure_policy == "recompute"
        assert config.kv_connector_extra_config["spec_name"] == "ADPOffloadingSpec"
        assert door.prepare(config).staging_bytes == 8192

    @pytest.mark.parametrize(
        ("extra", "paths"),
        [
            ({"adp": {"enpoint": "x"}}, ["$.adp.enpoint"]),
            ({"adpp": {}}, ["$.adpp"]),
            ({"adp": None}, ["$.adp"]),
            ({"blocks_per_chunk": "2"}, ["$.blocks_per_chunk"]),
            ({"blocks_per_chunk": 0}, ["$.blocks_per_chunk"]),
            ({"offload_prompt_only": "false"}, ["$.offload_prompt_only"]),
            ({"offload_prompt_only": False}, ["$.offload_prompt_only"]),
            ({"spec_name": "CPUOffloadingSpec"}, ["$.spec_name"]),
            (
                {"adpp": 1, "adp": {"load_seconds": 0, "token": 1}},
                ["$.adpp", "$.adp.load_seconds", "$.adp.token"],
            ),
        ],
    )
    def test_every_problem_is_named_with_its_path(self, extra, paths) -> None:
        with pytest.raises(ConfigError) as refused:
            door.settings(extra)
        assert sorted(problem.rpartition("@ ")[2] for problem in refused.value.problems) == sorted(paths)

    def test_lookup_of_the_class_is_where_it_stops(self, capsys) -> None:
        config = KVTransferConfig(**transfer_config({"enpoint": "x"}))
        with pytest.raises(StartupRefused) as refused:
            KVConnectorFactory.get_connector_class(config)
        assert refused.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("adp: unknown key (allowed: ")
        assert line.endswith("@ $.adp.enpoint")

    def test_another_connectors_config_is_none_of_our_business(self) -> None:
        config = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
        config.kv_connector_extra_config["whatever"] = 1
        KVConnectorFactory.get_connector_class(config)
        assert config.kv_connector_extra_config == {"whatever": 1}
        assert config.kv_load_failure_policy == "fail"

    def test_role_must_be_both(self) -> None:
        config = KVTransferConfig(**{**transfer_config({}), "kv_role": "kv_consumer"})
        with pytest.raises(StartupRefused, match='expected kv_role "kv_both", not "kv_consumer"'):
            door.prepare(config)

    def test_unknown_engine_is_one_line(self, monkeypatch, capsys) -> None:
        monkeypatch.setattr(_compat, "SUPPORTED", ("0.1",))
        with pytest.raises(UnsupportedEngine):
            KVConnectorFactory.get_connector_class(KVTransferConfig(**transfer_config({})))
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"adp: vLLM {_compat.engine_version()} is not supported; supported: 0.1"


def spec_for(gateway: DictGateway, *, shards: int, **settings: object) -> SimpleNamespace:
    """What the manager sees of a spec."""
    return SimpleNamespace(
        settings=OffloadingConfig(**{"staging_bytes": 1 << 20, **settings}),
        identity=lambda: attrs.evolve(IDENTITY, hashing={"algorithm": "sha256"}),
        shards=shards,
        replicated_layout=False,
        connect=gateway.connect,
        config=SimpleNamespace(worker_kv_bytes_per_block=100, cache=SimpleNamespace(blocks_per_chunk=1)),
    )


class Scheduler:
    """The manager, asked as vLLM's scheduler would."""

    def __init__(
        self, gateway: DictGateway, *, shards: int = 1, layouts: bool = True, **settings: object
    ) -> None:
        self.manager = ADPOffloadingManager(spec_for(gateway, shards=shards, **settings))
        sizes = (100, 60)
        self.manager.open(
            [WorkerLayout(rank=r, digest="d", object_bytes=sizes) for r in range(shards)] if layouts else []
        )
        self.request = ReqContext(req_id="r")
        until(lambda: self.manager._bridge.is_connected)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def lookup(self, key: bytes) -> LookupResult:
        return self.manager.lookup(key, self.request)

    def resolve(self, key: bytes) -> LookupResult:
        """Ask until the answer is final."""
        answers: list[LookupResult] = []

        def ask() -> bool:
            answers.append(self.lookup(key))
            self.step()
            return answers[-1] in (LookupResult.HIT, LookupResult.MISS)

        until(ask)
        return answers[-1]


@pytest.fixture(autouse=True)
def seeded_hashes(monkeypatch) -> None:
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"seed", raising=False)


@pytest.fixture
def gateway() -> DictGateway:
    return DictGateway()


@pytest.fixture
def make_scheduler(gateway):
    made = []

    def make(**options) -> Scheduler:
        made.append(Scheduler(gateway, **options))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.manager.shutdown()


KEY = make_offload_key(b"h" * 32, 0)


class TestManager:
    def test_lookup_to_staged_bytes(self, gateway, make_scheduler) -> None:
        scheduler = make_scheduler()
        gateway.objects[scheduler.manager.namespace, KEY + bytes(4)] = b"\7" * 100
        assert scheduler.lookup(KEY) is LookupResult.RETRY
        assert scheduler.resolve(KEY) is LookupResult.HIT
        source = scheduler.manager.prepare_load([KEY], scheduler.request)
        region = Region.attach(source.region)
        assert bytes(region.slot(source.slots[0][0], 100)) == b"\7" * 100
        region.close()
        assert gateway.verbs == ["ping", "exist", "read"]

    @pytest.mark.parametrize("shards", [1, 2, 4])
    def test_b13_hit_needs_every_shard(self, gateway, make_scheduler, shards: int) -> None:
        scheduler = make_scheduler(shards=shards)
        namespace = scheduler.manager.namespace
        for shard in range(shards):
            assert scheduler.resolve(KEY) is LookupResult.MISS
            gateway.objects[namespace, KEY + shard.to_bytes(4, "big")] = bytes(100)
            scheduler.manager.complete_store([KEY], scheduler.request)
        assert scheduler.resolve(KEY) is LookupResult.HIT
        assert len(set(scheduler.manager.prepare_load([KEY], scheduler.request).slots[0])) == shards

    def test_object_of_another_size_is_a_miss(self, gateway, make_scheduler) -> None:
        scheduler = make_scheduler()
        gateway.objects[scheduler.manager.namespace, KEY + bytes(4)] = b"\7" * 99
        assert scheduler.resolve(KEY) is LookupResult.MISS

    def test_unverified_chunk_makes_a_load_that_fails(self, make_scheduler) -> None:
        scheduler = make_scheduler()
        source = scheduler.manager.prepare_load([KEY], scheduler.request)
        assert (source.region, source.slots) == (None, ())

    def test_no_gateway_no_waiting(self, gateway, make_scheduler, caplog) -> None:
        scheduler = make_scheduler(lookup_seconds=0.05)
        gateway.is_connected = False
        until(lambda: not scheduler.manager.prepare_store([KEY], scheduler.request).keys_to_store)
        assert scheduler.lookup(KEY) is LookupResult.MISS
        for _ in range(3):
            scheduler.step()
        assert caplog.text.count("no gateway at") <= 1

    def test_b17_silent_gateway_is_a_miss_at_the_deadline(self, gateway, make_scheduler) -> None:
        scheduler = make_scheduler(lookup_seconds=0.1)
        gateway.is_silent = True
        assert scheduler.resolve(KEY) is LookupResult.MISS

    def test_known_chunks_are_not_stored_again(self, gateway, make_scheduler) -> None:
        scheduler = make_scheduler()
        gateway.objects[scheduler.manager.namespace, KEY + bytes(4)] = bytes(100)
        scheduler.resolve(KEY)
        other = make_offload_key(b"o" * 32, 1)
        assert scheduler.manager.prepare_store([KEY, other], scheduler.request).keys_to_store == [other]

    def test_excluded_request_stays_out_until_it_ends(self, gateway, make_scheduler) -> None:
        scheduler = make_scheduler()
        scheduler.manager.exclude("r")
        assert scheduler.lookup(KEY) is LookupResult.MISS
        assert scheduler.manager.prepare_store([KEY], scheduler.request).keys_to_store == []
        scheduler.manager.on_request_finished(scheduler.request)
        assert scheduler.lookup(KEY) is LookupResult.RETRY

    def test_reset_meets_nothing_from_before_and_keeps_what_is_read(self, gateway, make_scheduler) -> None:
        scheduler = make_scheduler(staging_bytes=4096)
        gateway.objects[scheduler.manager.namespace, KEY + bytes(4)] = b"\7" * 100
        scheduler.resolve(KEY)
        source = scheduler.manager.prepare_load([KEY], scheduler.request)
        scheduler.manager.reset_cache()
        assert scheduler.resolve(KEY) is LookupResult.MISS
        # The one slot is still being read by a worker: nothing may be fetched into it.
        gateway.objects[scheduler.manager.namespace, KEY + bytes(4)] = b"\1" * 100
        scheduler.manager.complete_store([KEY], scheduler.request)
        assert scheduler.resolve(KEY) is LookupResult.MISS
        scheduler.manager.release(source.ticket)
        until(lambda: scheduler.resolve(KEY) is LookupResult.HIT)

    def test_stock_connector_releases_by_keys(self, gateway, make_scheduler) -> None:
        scheduler = make_scheduler(layouts=False)
        gateway.objects[scheduler.manager.namespace, KEY + bytes(4)] = bytes(100)
        scheduler.resolve(KEY)
        scheduler.manager.prepare_load([KEY], scheduler.request)
        scheduler.manager.complete_load({KEY}, scheduler.request)
        assert not scheduler.manager._pins

    def test_counts_reach_vllms_metrics_once(self, make_scheduler) -> None:
        scheduler = make_scheduler()
        scheduler.resolve(KEY)
        scheduler.manager.count_workers({"objects_stored": 3})
        stats = scheduler.manager.get_stats()
        (name,) = stats._values
        assert name == "vllm:adp_events"
        assert stats._values[name][("objects_stored",)] == 3
        assert stats._values[name][("chunks_absent",)] == 1
        assert scheduler.manager.get_stats() is None


def test_failure_on_one_rank_is_a_failure_on_all() -> None:
    ranks = [ADPWorkerMetadata({1: 1, 2: 1}), ADPWorkerMetadata({1: 1, 2: 1}, failed_loads={2})]
    for a, b in (ranks, reversed(ranks)):
        merged = a.aggregate(b)
        assert (merged.completed_jobs, merged.failed_loads) == ({1: 2, 2: 2}, {2})


class TestWorker:
    """Both directions over real tensors: padded rows, two groups that share one, several blocks a chunk."""

    @pytest.mark.parametrize(("row", "page"), [(64, 64), (72, 64), (61, 53)], ids=["plain", "padded", "odd"])
    @pytest.mark.parametrize("per_chunk", [1, 2])
    def test_b07_bytes_survive_and_neighbours_are_untouched(
        self, row: int, page: int, per_chunk: int
    ) -> None:
        torch.manual_seed(0)
        tensors = [torch.randint(-128, 128, (20, row), dtype=torch.int8) for _ in range(3)]
        geometry = Geometry.from_description(
            [Tensor(blocks=20, row_bytes=row, stride_bytes=row)] * 3,
            [
                [LayerRef(tensor=0, page_bytes=page), LayerRef(tensor=1, page_bytes=page)],
                [LayerRef(tensor=2, page_bytes=page - 8)],
            ],
            blocks_per_chunk=per_chunk,
            layer_names=[["a", "b"], ["c"]],
        )
        copies = copies_for(geometry, tensors)
        region = Region.create(slots=8, slot_bytes=slot_bytes_for(max(geometry.object_bytes)))
        sources, targets = (4, 2, 9, 6), (11, 13, 12, 15)
        chunks = 4 // per_chunk
        slots = [5, 0, 3, 1, 7, 2, 6, 4]
        keys = [0] * chunks + [1] * chunks
        stores, refused = plan_store(per_chunk, [4, 4], sources * 2, keys)
        assert not refused
        for moves in stores:
            copies.store(None, moves, region, slots)
        before = [tensor.clone() for tensor in tensors]
        loads = plan_load(per_chunk, [4, 4], [0, 0], (*targets, 16, 17, 18, 19), keys)
        for moves in loads or ():
            copies.load(None, moves, region, slots)
        expected = [tensor.clone() for tensor in before]
        for tensor, size, blocks in zip(
            expected, (page, page, page - 8), (targets, targets, (16, 17, 18, 19)), strict=True
        ):
            for source, target in zip(sources, blocks, strict=True):
                tensor[target, :size] = tensor[source, :size]
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))

    def test_b13_keys_looked_up_are_keys_written(self, gateway, make_scheduler) -> None:
        """One manager, two ranks: what the scheduler asks for is what the workers store, shard by shard."""
        scheduler = make_scheduler(shards=2)
        keys = [
            make_offload_key(b"a" * 32, 0),
            make_offload_key(b"b" * 32, 0),
            make_offload_key(b"b" * 32, 1),
        ]
        target = scheduler.manager.prepare_store(keys, scheduler.request).store_spec
        workers = []
        for rank in range(2):
            tensors = [torch.full((8, 100), rank + 1, dtype=torch.int8)]
            spec = SimpleNamespace(
                settings=OffloadingConfig(store_staging_bytes=1 << 16),
                shard=rank,
                config=SimpleNamespace(parallel=SimpleNamespace(rank=rank)),
                connect=gateway.connect,
                geometry=lambda _: Geometry.from_description(
                    [Tensor(blocks=8, row_bytes=100, stride_bytes=100)],
                    [[LayerRef(tensor=0, page_bytes=100)], [LayerRef(tensor=0, page_bytes=60)]],
                    blocks_per_chunk=1,
                    layer_names=[["a"], ["b"]],
                ),
            )
            workers.append(
                ADPOffloadingWorker(
                    spec, SimpleNamespace(tensors=[SimpleNamespace(tensor=t) for t in tensors])
                )
            )
        until(lambda: all(worker.transfers._bridge.is_connected for worker in workers))
        for worker in workers:
            assert worker.submit_store(1, GPULoadStoreSpec([1, 2, 3], (2, 1), (0, 1)), target)
        finished = {id(worker): [] for worker in workers}
        until(lambda: all(finished[id(w)].extend(w.get_finished()) or finished[id(w)] for w in workers))
        assert all(result.success for results in finished.values() for result in results)
        assert [scheduler.resolve(key) for key in keys] == [LookupResult.HIT] * 3
        source = scheduler.manager.prepare_load(keys, scheduler.request)
        region = Region.attach(source.region)
        assert [[region.slot(slot, 1)[0] for slot in shards] for shards in source.slots] == [[1, 2]] * 3
        region.close()
        for worker in workers:
            assert worker.submit_load(
                2, LoadSource(9, None, tuple(keys), ()), GPULoadStoreSpec([4, 5, 6], (2, 1), (0, 1))
            )
            until(lambda worker=worker: [r.job_id for r in worker.get_finished()] == [2])
            assert worker.take_failed_loads() == {2}
            assert worker.take_failed_loads() == set()
            assert worker.take_counted()["loads_failed"] == 3
            worker.wait({1, 2, 77})
            worker.shutdown()
