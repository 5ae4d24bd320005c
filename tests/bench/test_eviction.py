"""The simulation behind docs/adr/0016: its references on traces that can be done by hand; and it runs."""

import pytest

from bench.eviction import (
    WORKLOADS,
    ClockLog,
    Fifo,
    Lru,
    Outcome,
    Request,
    S3Fifo,
    TwoQueueLog,
    Workload,
    bound,
    main,
    play,
    requests,
)


def agent(*blocks: int) -> Request:
    return Request(list(blocks), is_agent=True)


@pytest.mark.parametrize(
    ("cache", "hits"),
    [
        (Fifo(4), 2 + 1 + 0),  # 5 takes the place of 1
        (Lru(4), 2 + 1 + 1),  # of 2
        (S3Fifo(4, share=0.5, needed=1), 2 + 1 + 2),  # of 3, which nobody has read
    ],
)
def test_references_by_hand(cache, hits):
    batch = [Request([3, 4], is_agent=False), Request([5], is_agent=False)]
    trace = [agent(1, 2), agent(1, 2), agent(1), *batch, agent(1, 2)]  # the first is warm-up
    assert play(trace, cache, restart=False).restored == pytest.approx(hits / 5)


def test_nobody_beats_the_bound():
    trace = [agent(1, 2), agent(1, 2, 3), agent(1, 2, 3, 4), Request([5], is_agent=False), agent(1, 2)]
    assert bound(trace, 4) == Outcome(7 / 9, 1.0), "3 and 4 are new"
    workload = Workload(name="small", agents=8, batch_share=0.5, hours=1.0)
    trace = requests(workload, seed=1)
    best = bound(trace, 1024).restored
    for cache in (
        Fifo(1024),
        Lru(1024),
        S3Fifo(1024),
        ClockLog(1024, segment_blocks=16),
        TwoQueueLog(1024, segment_blocks=16),
    ):
        assert play(trace, cache, restart=False).restored < best


def test_a_log_never_holds_more_than_fits():
    for log in (ClockLog(256, segment_blocks=16), TwoQueueLog(256, segment_blocks=16)):
        for at, request in enumerate(requests(Workload(name="small", agents=4, hours=0.5), seed=2)):
            play([request, request], log, restart=False)
            assert len(log._segments) <= 14
            assert len(log._active.blocks) <= 16
            assert sum(len(segment.blocks) for segment in log._segments) <= 14 * 16
            if at == 20:
                log.restart()


def test_two_queues_serve_agents_better_than_a_clock_and_write_less():
    trace = requests(Workload(name="small", agents=22, batch_share=0.7, hours=1.0), seed=0)
    clock = play(trace, ClockLog(8192, segment_blocks=128), restart=False)
    ours = play(trace, TwoQueueLog(8192, segment_blocks=128), restart=False)
    assert ours.restored > clock.restored + 0.05
    assert ours.written < 1.15 < clock.written


@pytest.mark.timeout(120)
def test_the_command_prints_a_row_for_each_policy(capsys, monkeypatch):
    small = tuple(Workload(name=w.name, agents=3, hours=0.3, restart=w.restart) for w in WORKLOADS[-2:])
    monkeypatch.setattr("bench.eviction.WORKLOADS", small)
    assert main(["--blocks", "512", "--segments", "16", "--seeds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| policy | 0.8x, 70% batch, restart | 1.4x, restart |"
    assert any(line.startswith("| two queues |") for line in lines)
    assert all(line.count("|") == 4 for line in lines)
