"""The client contract: the project's client and another one keep it, and every clause of it can fail."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from adp_client.testing import check_client_contract
from adp_client.testing.conformance import CLIENT_CLAUSES, Verdict, run_adp_client
from adp_client.testing.conformance.client_contract import AdaptedClient, Dial
from adp_client.transport import Transport
from gateway.waiting import on_a_jumping_clock
from policy.checkout import ROOT

from .simple_client import FAULTS, running

pytestmark = pytest.mark.anyio


class BytesOnly:
    """A transport without what only works within one host."""

    carries_descriptors = False

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


async def test_the_projects_client_keeps_it() -> None:
    report = await check_client_contract(run_adp_client, seconds=15)
    assert report.is_kept, report
    skipped = [result.id for result in report.results if result.verdict is Verdict.SKIPPED]
    assert skipped == ["4.4-feature-not-offered"], "where it can share memory it offers every feature"


async def test_the_projects_client_refuses_a_feature_that_it_did_not_offer() -> None:
    @asynccontextmanager
    async def run_without_memory(dial: Dial) -> AsyncGenerator[AdaptedClient]:
        async def dial_bytes_only() -> Transport:
            return BytesOnly(await dial())

        async with run_adp_client(dial_bytes_only) as client:
            yield client

    report = await check_client_contract(run_without_memory, only=["4.4-feature-not-offered"], seconds=15)
    assert [result.verdict for result in report.results] == [Verdict.PASSED], report


async def test_a_client_that_does_one_thing_at_a_time_keeps_it() -> None:
    report = await check_client_contract(running(), seconds=15)
    assert report.is_kept, report
    assert report.count(Verdict.SKIPPED) == 0


@on_a_jumping_clock
@pytest.mark.parametrize(
    ("clause", "fault"), [(clause, fault) for clause, faults in FAULTS.items() for fault in faults]
)
async def test_every_clause_finds_a_client_that_breaks_it(clause: str, fault: str) -> None:
    report = await check_client_contract(running(fault), only=[clause], seconds=5)
    (result,) = report.results
    assert result.verdict is Verdict.FAILED, result
    assert re.search(r"expected .+ got .+", result.sentence), result.sentence


class Statusless:
    """An adapter that returns what no verb returns."""

    def __init__(self, found: object) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
        if name == "delete":
            raise AttributeError("this adapter has no delete")

        async def verb(*arguments: object) -> object:
            return self._found

        return verb


@on_a_jumping_clock
@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize(
    ("clause", "found", "words"),
    [
        ("4.4-extension-skipped", 0, "expected [NOT_FOUND], got int 0"),
        ("4.4-extension-skipped", ["?"], "expected [NOT_FOUND], got list [?]"),
        ("4.4-extension-critical", True, "expected [NOT_FOUND] or an error, got bool True"),
        ("5.4-misses", 3, "got TypeError: "),
        ("7.5-delete-once", None, "got AttributeError: this adapter has no delete"),
    ],
)
async def test_an_adapter_of_another_kind_fails_its_clause_in_words(
    clause: str, found: object, words: str, in_group: bool
) -> None:
    @asynccontextmanager
    async def run_strange(dial: Dial) -> AsyncGenerator[Any]:
        if not in_group:
            yield Statusless(found)
            return
        async with anyio.create_task_group():
            yield Statusless(found)

    report = await check_client_contract(run_strange, only=[clause], seconds=5)
    (result,) = report.results
    assert result.verdict is Verdict.FAILED
    assert words in result.sentence
    assert re.search(r"expected .+ got .+", result.sentence), result.sentence


def test_there_is_a_wrong_client_for_every_clause() -> None:
    assert set(FAULTS) == {clause.id for clause in CLIENT_CLAUSES}
    assert len(FAULTS) == len(CLIENT_CLAUSES)


@pytest.mark.parametrize("clause", CLIENT_CLAUSES, ids=lambda clause: clause.id)
def test_clauses_are_sentences_of_sections_that_exist(clause) -> None:
    spec = (ROOT / "docs" / "spec" / "adp-1.md").read_text()
    assert re.search(rf"^##+ {re.escape(clause.section)}\.? ", spec, flags=re.MULTILINE), clause.section
    assert re.fullmatch(r"[A-Z`].{20,200}\.", clause.statement)
