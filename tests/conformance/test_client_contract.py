"""The client contract: the project's client and another one keep it, and every clause of it can fail."""

import re

import pytest

from adp_client.testing import check_client_contract
from adp_client.testing.conformance import CLIENT_CLAUSES, Verdict, run_adp_client
from gateway.waiting import on_a_jumping_clock
from policy.checkout import ROOT

from .simple_client import FAULTS, running

pytestmark = pytest.mark.anyio


async def test_the_projects_client_keeps_it() -> None:
    report = await check_client_contract(run_adp_client, seconds=15)
    assert report.is_kept, report
    assert report.count(Verdict.SKIPPED) == 0


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


def test_there_is_a_wrong_client_for_every_clause() -> None:
    assert set(FAULTS) == {clause.id for clause in CLIENT_CLAUSES}
    assert len(FAULTS) == len(CLIENT_CLAUSES)


@pytest.mark.parametrize("clause", CLIENT_CLAUSES, ids=lambda clause: clause.id)
def test_clauses_are_sentences_of_sections_that_exist(clause) -> None:
    spec = (ROOT / "docs" / "spec" / "adp-1.md").read_text()
    assert re.search(rf"^##+ {re.escape(clause.section)}\.? ", spec, flags=re.MULTILINE), clause.section
    assert re.fullmatch(r"[A-Z`].{20,200}\.", clause.statement)
