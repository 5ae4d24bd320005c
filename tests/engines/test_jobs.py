import threading

import pytest

from adp_engines.jobs import Done, JobLedger


@pytest.fixture
def now():
    return [10.0]


@pytest.fixture
def ledger(now):
    return JobLedger(lambda: now[0])


def test_job_is_reported_once_with_its_time(ledger, now) -> None:
    ledger.accept(7, is_load=True)
    assert ledger.take_done() == []
    now[0] += 2.5
    ledger.finish(7, moved_bytes=100)
    ledger.finish(7, moved_bytes=999, is_failed=True)
    assert ledger.take_done() == [Done(job_id=7, moved_bytes=100, seconds=2.5, is_load=True)]
    assert ledger.take_done() == []


def test_job_is_accepted_once(ledger) -> None:
    ledger.accept(1, is_load=False)
    with pytest.raises(ValueError, match="job 1 was accepted before"):
        ledger.accept(1, is_load=False)


def test_unknown_and_finished_jobs_are_settled(ledger) -> None:
    ledger.accept(1, is_load=False)
    ledger.finish(1, moved_bytes=0)
    assert ledger.wait_settled({1, 99}, 0) == ()


def test_settled_is_enough_to_go_on(ledger) -> None:
    ledger.accept(1, is_load=False)
    waiter = threading.Thread(target=lambda: ledger.wait_settled({1}, 10))
    waiter.start()
    ledger.settle(1)
    waiter.join(10)
    assert not waiter.is_alive()
    assert ledger.take_done() == []


def test_waiting_makes_a_job_urgent_and_giving_up_revokes_it(ledger) -> None:
    ledger.accept(1, is_load=False)
    ledger.accept(2, is_load=False)
    assert not ledger.is_urgent(1)
    ledger.settle(2)
    assert ledger.wait_settled({1, 2}, 0) == (1,)
    assert ledger.is_urgent(1)
    assert ledger.is_revoked(1)
    assert not ledger.is_revoked(2)
    ledger.settle(3)  # unknown: ignored
