"""One loop of `nox -s crash`, with real processes; and its command line."""

import subprocess
import sys

import pytest

from crash import kills
from crash.problems import to_table
from policy.checkout import ROOT


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [0, 3], ids=["tight", "roomy"])
def test_b42_a_gateway_is_killed_in_a_storm(number):
    """B42(c), for 64 and more puts at once, with reads, leases and deletes between them."""
    said: list[str] = []
    report = kills.anyio.run(lambda: kills.run(1, [number], say=said.append))
    assert report.problems.texts == []
    assert report.passed
    assert report.kills_in_storms >= 1
    assert report.verified > 10
    assert report.tally.writes > 5
    assert said[0].startswith(f"loop {number}: {'tight' if number == 0 else 'roomy'}")
    assert to_table(report).endswith("PASS")


def test_bad_usage():
    for words in (["--loops", "0"], ["power", "--cuts", "0"], ["nonsense"]):
        done = subprocess.run(
            [sys.executable, "-m", "crash", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, words
