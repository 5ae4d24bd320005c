"""The arithmetic of the benchmark's table."""

from bench.report import Row, to_table, worst


def test_times_are_medians_in_milliseconds_and_the_ratio_says_how_many_times_as_fast() -> None:
    row = Row.of_times("exist", ours=[0.002, 0.001, 0.009], reference=[0.010, 0.030, 0.012])
    assert row == Row(name="exist", ours=2.0, reference=12.0, ratio=6.0, unit="ms", samples=3)


def test_without_a_reference_there_is_no_ratio() -> None:
    row = Row.of_times("exist", ours=[0.002])
    assert (row.reference, row.ratio) == (None, None)


def test_throughput_is_bytes_over_median_time() -> None:
    row = Row.of_throughput("read", moved_bytes=2**30, ours=[0.5, 0.5], reference=[0.25, 0.25])
    assert row == Row(name="read", ours=2.0, reference=4.0, ratio=0.5, unit="GiB/s", samples=2)


def test_worst_is_the_lowest_ratio_under_the_common_name() -> None:
    rows = [
        Row.of_throughput(f"read/{n}", moved_bytes=2**30, ours=[1.0], reference=[reference])
        for n, reference in enumerate([0.9, 0.8, 0.95])
    ]
    assert worst("read", rows) == rows[1].renamed("read")


def test_json_has_the_documented_keys() -> None:
    row = Row.of_times("exist", ours=[0.002])
    assert list(row.to_json()) == ["name", "ours", "reference", "ratio", "unit", "samples"]


def test_table_is_aligned_and_shows_what_is_missing() -> None:
    rows = [Row.of_times("exist", ours=[0.002]), Row.of_times("other", ours=[0.002], reference=[0.004])]
    head, first, second = to_table(rows).splitlines()
    assert head.split() == ["name", "ours", "reference", "unit", "ratio", "samples"]
    assert len(head) == len(first) == len(second)
    assert first.split() == ["exist", "2", "-", "ms", "-", "1"]
    assert second.split() == ["other", "2", "4", "ms", "2", "1"]
