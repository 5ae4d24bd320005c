"""What may be found after a crash, and that the judge notices everything else."""

import itertools

import pytest

from crash.history import History, Name, Verdict, contents

NAME: Name = (bytes(32), b"name")


@pytest.fixture
def history() -> History:
    return History(itertools.count().__next__)


def judged(history: History, found: bytes | None, *, may_evict: bool = False) -> Verdict | None:
    now = history.now()
    return history.judge(NAME, found, now, now, may_evict=may_evict)


def test_what_was_acknowledged_last_has_to_be_there(history):
    first, old = history.write(NAME, 5000)
    history.acknowledge(first)
    second, new = history.write(NAME, 5000)
    history.acknowledge(second)
    assert judged(history, new) is None
    assert judged(history, old) is Verdict.PHANTOM
    assert judged(history, None) is Verdict.LOST
    assert judged(history, None, may_evict=True) is None
    assert judged(history, old, may_evict=True) is Verdict.PHANTOM


def test_what_is_under_way_may_be_there_or_not(history):
    first, old = history.write(NAME, 5000)
    history.acknowledge(first)
    _, new = history.write(NAME, 700)
    assert judged(history, old) is judged(history, new) is None
    history.delete(NAME)
    assert judged(history, None) is None
    assert judged(history, b"") is Verdict.CORRUPT


def test_a_deleted_object_stays_away(history):
    first, old = history.write(NAME, 1)
    assert judged(history, None) is None, "it was never acknowledged"
    history.acknowledge(first)
    history.acknowledge(history.delete(NAME))
    assert judged(history, None) is None
    assert judged(history, old) is Verdict.PHANTOM
    assert history.judge(NAME, old, first.acknowledged, first.acknowledged, may_evict=False) is None, "then"


def test_a_write_that_was_refused_leaves_what_was_there(history):
    first, old = history.write(NAME, 100)
    history.acknowledge(first)
    refused, new = history.write(NAME, 200)
    history.withdraw(NAME, refused)
    assert judged(history, old) is None
    assert judged(history, new) is Verdict.CORRUPT


@pytest.mark.parametrize("length", [600, 5000, 300_000])
def test_parts_and_mixtures_are_told_from_rubbish(history, length):
    (first, old), (second, new) = history.write(NAME, length), history.write(NAME, length)
    history.acknowledge(first)
    history.acknowledge(second)
    assert len(old) == len(new) == length
    assert judged(history, new[:512] + bytes(length - 512)) is Verdict.HALF
    assert judged(history, old[:512] + new[512:]) is Verdict.HALF
    assert judged(history, new[:-1]) is Verdict.HALF
    assert judged(history, bytes(length)) is Verdict.CORRUPT
    assert judged(history, contents((bytes(32), b"other"), 2, length)) is Verdict.CORRUPT


def test_after_a_crash_that_is_settled_what_was_under_way_is_over(history):
    first, old = history.write(NAME, 100)
    history.acknowledge(first)
    _, new = history.write(NAME, 200)
    history.settle(NAME, old)
    assert judged(history, old) is None
    assert judged(history, new) is Verdict.CORRUPT
    history.settle(NAME, None)
    assert judged(history, old) is None, "it may have been evicted, and come back"
    history.settle_absent(NAME)
    assert judged(history, old) is Verdict.PHANTOM


def test_a_fork_goes_on_from_what_was_observed(history):
    first, old = history.write(NAME, 100)
    history.acknowledge(first)
    _, new = history.write(NAME, 200)
    at = history.now()
    seen = history.fork(lambda: 0, {NAME: new}, at, may_evict=True)
    assert seen.judge(NAME, new, 0, 0, may_evict=False) is None
    assert seen.judge(NAME, old, 0, 0, may_evict=True) is not None
    missed = history.fork(lambda: 0, {NAME: None}, at, may_evict=True)
    assert missed.judge(NAME, old, 0, 0, may_evict=True) is None
    assert missed.judge(NAME, new, 0, 0, may_evict=True) is None
    absent = history.fork(lambda: 0, {NAME: None}, at, may_evict=False)
    assert absent.judge(NAME, None, 0, 0, may_evict=False) is None
    assert absent.judge(NAME, old, 0, 0, may_evict=False) is not None
