"""Lines about peers, and how many of them there may be."""

from adp_gateway.logs import Complaints


def test_one_line_and_then_how_many_more() -> None:
    complaints = Complaints(silence_seconds=10)
    assert complaints.about("tcp://10.0.0.1:5000", "closed", now=0) == ""
    for n in range(5):
        assert complaints.about(f"tcp://10.0.0.1:{5001 + n}", "closed", now=n) is None
    assert complaints.about("tcp://10.0.0.2:5000", "closed", now=5) == ""
    assert complaints.about("tcp://10.0.0.1:5000", "turned away", now=5) == ""
    assert complaints.about("unix:///s#1", "closed", now=5) == ""
    assert complaints.about("unix:///s#2", "closed", now=6) is None
    said = complaints.about("tcp://10.0.0.1:6000", "closed", now=10)
    assert said == " (and 5 times more from there since the last line about it)"
    assert complaints.about("tcp://10.0.0.1:6000", "closed", now=19) is None
    assert complaints.about("tcp://10.0.0.1:6000", "closed", now=1000) == ""


def test_many_addresses_share_what_is_left() -> None:
    complaints = Complaints(most=4)
    lines = [complaints.about(f"tcp://10.0.0.{n}:1", "closed", now=0) for n in range(100)]
    assert lines == [""] * 5 + [None] * 95
    assert complaints.about("tcp://10.0.1.1:1", "closed", now=10) == (
        " (and 95 times more from others since the last line about it)"
    )
    assert complaints.about("tcp://10.0.1.1:1", "closed", now=100) == ""
    assert len(complaints._told) == 1
