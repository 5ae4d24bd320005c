"""The gateway contract: kept by the gateways of this project, and every clause of it can fail."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from adp_client.protocol.constants import Feature
from adp_client.protocol.messages import Limits
from adp_client.protocol.workers import Place, WorkerMap, encode_worker_map
from adp_client.testing import MemoryGateway, Session, check_gateway_contract
from adp_client.testing.conformance import GATEWAY_CLAUSES, Level, NoGateway, Report, Verdict
from adp_client.transport import Transport, UnixEndpoint, connect
from adp_gateway.config import GatewayConfig, StoreConfig
from adp_gateway.server import Server
from adp_gateway.shared import Patience
from adp_gateway.store.base import ObjectStore
from adp_gateway.store.memory import MemoryStore
from adp_gateway.store.segments import SegmentStore
from gateway.waiting import on_a_jumping_clock
from policy.checkout import ROOT

from .broken_gateways import MUTANTS, TOKEN, AbsurdLimits, Make, with_session

pytestmark = pytest.mark.anyio

PATIENT = 30.0  # no clause of a right gateway may fail because a machine is busy
FAREWELL = 0.3  # nor may its last words be cut off; most clauses that see them wait so long
CLAUSES = {clause.id: clause for clause in GATEWAY_CLAUSES}
MIB = 1 << 20


async def check(gateway: MemoryGateway, **options: object) -> Report:
    """Try the contract on a gateway in memory."""

    async def dial() -> Transport:
        return await gateway.dial(UnixEndpoint(path="/memory"))

    async with gateway:
        return await check_gateway_contract(dial, token=TOKEN.encode(), **options)  # type: ignore[arg-type]


class Plain:
    """A transport without the means to send descriptors."""

    def __init__(self, inner: Transport) -> None:
        self.receive_some = inner.receive_some
        self.receive_exactly = inner.receive_exactly
        self.send = inner.send
        self.send_file = inner.send_file
        self.abort = inner.abort
        self.aclose = inner.aclose


def skipped(report: Report) -> set[str]:
    return {result.id for result in report.results if result.verdict is Verdict.SKIPPED}


@pytest.mark.parametrize(
    "absurd", [{"max_items": 0}, {"max_key_bytes": 129}, {"max_body_bytes": 100}], ids=str
)
async def test_limits_that_nobody_could_live_with_end_the_trial(absurd: dict[str, int]) -> None:
    with pytest.raises(NoGateway, match=f"MALFORMED: {next(iter(absurd))}"):
        await check(with_session(AbsurdLimits, limits=Limits(**absurd))())


async def test_regions_are_tried_where_descriptors_travel() -> None:
    """Over anything else they are not announced; and if they were, nothing could be asked."""
    regions = {clause.id for clause in GATEWAY_CLAUSES if clause.needs & Feature.REGIONS}
    assert len(regions) == len([clause for clause in CLAUSES if clause.startswith("5.14-")]) > 15
    for is_announced, sentence in (
        (False, "the gateway does not announce REGIONS"),
        (True, "the transport carries no descriptors"),
    ):
        gateway = MemoryGateway(token=TOKEN)
        gateway.wrap = Plain
        if not is_announced:
            gateway.features &= ~Feature.REGIONS
        report = await check(gateway, only=sorted(regions))
        assert skipped(report) == regions
        assert {result.sentence for result in report.results} == {sentence}


# ---------------------------------------------------------------- right gateways


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "chunk_bytes": 13,
            "limits": Limits(max_inflight_bytes=MIB, max_object_bytes=5000, max_items=300, max_requests=20),
        },
        {
            "frame_bytes": 1000,
            "capacity_bytes": 5000,
            "limits": Limits(max_inflight_bytes=2 * MIB, max_object_bytes=MIB),
        },
        {"limits": Limits(max_requests=7, max_items=50, max_key_bytes=20, max_payload_bytes=5000)},
        {"fragments": False, "limits": Limits(max_command_bytes=5000, max_inflight_bytes=64 * MIB)},
    ],
    ids=["default", "dribbling", "small frames", "small limits", "no fragments"],
)
async def test_the_gateway_in_memory_keeps_it(settings: dict[str, object]) -> None:
    gateway = MemoryGateway(token=TOKEN, **settings)  # type: ignore[arg-type]
    report = await check(gateway, seconds=PATIENT)
    assert report.is_kept, report
    assert report.count(Verdict.PASSED) > 75
    assert gateway.objects == {}  # nothing is left behind
    assert gateway.violations != []


async def test_one_of_several_workers_keeps_it() -> None:
    gateway = MemoryGateway(token=TOKEN)
    told = WorkerMap(gateway_id=bytes(16), places=(Place(port=7172), Place(port=7173)), worker=1)
    gateway.extensions = (encode_worker_map(told),)
    report = await check(gateway, seconds=PATIENT)
    assert report.is_kept, report
    assert "4.5-workers" not in skipped(report)


@asynccontextmanager
async def serving(tmp_path: Path, store: ObjectStore, token: bytes | None) -> AsyncIterator[UnixEndpoint]:
    endpoint = UnixEndpoint(path=str(tmp_path / "s"))
    config = GatewayConfig(store=StoreConfig(directory=tmp_path), listen=(endpoint,), token=token)
    server = Server(config, store, patience=Patience(farewell_seconds=FAREWELL))
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        yield endpoint
        server.drain()
    assert server.counters.faults == 0
    assert server.counters.sessions == 0


@asynccontextmanager
async def segment_store(tmp_path: Path) -> AsyncIterator[ObjectStore]:
    config = StoreConfig(directory=tmp_path / "kv", capacity_bytes=64 * MIB, max_object_bytes=2 * MIB)
    async with SegmentStore.open(config) as store:
        yield store


@asynccontextmanager
async def memory_store(tmp_path: Path) -> AsyncIterator[ObjectStore]:
    yield MemoryStore()


@pytest.mark.parametrize("store", [memory_store, segment_store])
@pytest.mark.parametrize("token", [None, b"secret"])
async def test_the_real_gateway_keeps_it(tmp_path: Path, store, token: bytes | None) -> None:
    async with store(tmp_path) as objects, serving(tmp_path, objects, token) as endpoint:

        async def dial() -> Transport:
            return await connect(endpoint)

        report = await check_gateway_contract(dial, token=token, level=Level.FULL, seconds=PATIENT)
        assert report.is_kept, str(report)
        assert skipped(report) == {"4.4-no-fragments", "4.5-workers"} | (
            {"8-token"} if token is None else set()
        )
        assert objects.stats().objects == 0
        assert objects.stats().leases == 0


# ---------------------------------------------------------------- wrong gateways


CASES = [
    pytest.param(clause, make, id=f"{clause}: {make.__name__}")
    for clause, mutants in MUTANTS.items()
    for make in mutants
]


def test_there_is_a_wrong_gateway_for_every_clause() -> None:
    assert set(MUTANTS) == set(CLAUSES)
    assert all(MUTANTS.values())


@on_a_jumping_clock
@pytest.mark.parametrize(("clause", "make"), CASES)
async def test_every_clause_finds_a_gateway_that_breaks_it(clause: str, make: Make) -> None:
    report = await check(make(), only=[clause], level=Level.FULL, seconds=5)
    (result,) = report.results
    assert result.verdict is Verdict.FAILED, result
    assert re.search(r"expected .+ got .+", result.sentence), result.sentence
    assert len(result.sentence) < 400
    assert (result.id, result.section) == (clause, clause.partition("-")[0])


@pytest.mark.parametrize("clause", GATEWAY_CLAUSES, ids=lambda clause: clause.id)
def test_clauses_are_sentences_of_sections_that_exist(clause) -> None:
    spec = (ROOT / "docs" / "spec" / "adp-1.md").read_text()
    assert re.search(rf"^##+ {re.escape(clause.section)}\.? ", spec, flags=re.MULTILINE), clause.section
    assert re.fullmatch(r"[A-Z`].{20,200}\.", clause.statement)
    assert (clause.level is Level.FULL) == bool(clause.needs) or clause.id == "10-full"


def test_ids_are_used_once() -> None:
    assert len(CLAUSES) == len(GATEWAY_CLAUSES)


# ---------------------------------------------------------------- the contract itself


class Silent(Session):
    """Takes everything and says nothing."""

    async def greet(self, event) -> None:
        await anyio.sleep_forever()


@on_a_jumping_clock
async def test_where_no_gateway_answers_there_is_nothing_to_check() -> None:
    gateway = MemoryGateway()
    gateway.session_type = Silent
    with pytest.raises(NoGateway, match="no WELCOME within 5 s"):
        await check(gateway, seconds=5)
    gateway = MemoryGateway(token="another")
    with pytest.raises(NoGateway, match="UNAUTHENTICATED"):
        await check(gateway)
    gateway = MemoryGateway()
    gateway.is_down = True
    with pytest.raises(NoGateway, match="is down"):
        await check(gateway)


async def test_only_some_clauses_in_the_order_of_the_contract_told_as_they_come() -> None:
    told = []
    report = await check(
        MemoryGateway(token=TOKEN), only=["5.10-ping", "3.1-magic", "10-full"], tell=told.append
    )
    assert [result.id for result in report.results] == ["3.1-magic", "10-full", "5.10-ping"]
    assert sorted(told, key=report.results.index) == list(report.results)
    assert str(report) == "2 pass, 0 fail, 1 skip"


async def test_a_feature_that_is_announced_is_tried_and_one_that_is_not_is_skipped() -> None:
    for features, verdict, sentence in (
        (Feature.CREDITS, Verdict.PASSED, ""),
        (Feature.NONE, Verdict.SKIPPED, "the gateway does not announce CREDITS"),
    ):
        report = await check(MemoryGateway(token=TOKEN, features=features), only=["5.12-credit"])
        (result,) = report.results
        assert (result.verdict, result.sentence) == (verdict, sentence)
