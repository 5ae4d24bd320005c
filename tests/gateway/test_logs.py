"""Lines about peers, and how many of them there may be."""

import logging

import pytest

from adp_gateway.logs import Complaints, shown


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


def test_telling_is_limited_and_keeps_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    complaints, logger = Complaints(), logging.getLogger("adp_gateway.tests")
    for port in range(100):
        complaints.tell(logger, logging.INFO, f"tcp://10.0.0.1:{port}", "sending failed", str(port), now=0)
    complaints.tell(logger, logging.ERROR, "tcp://10.0.0.1:7", "failed", now=0, bug=KeyError("bug"))
    complaints.tell(logger, logging.INFO, "tcp://10.0.0.1:8", "sending failed", "last", now=10)
    assert caplog.messages == [
        "tcp://10.0.0.1:0: sending failed: 0",
        "tcp://10.0.0.1:7: failed",
        "tcp://10.0.0.1:8: sending failed: last (and 99 times more from there since the last line about it)",
    ]
    assert [record.exc_info is not None for record in caplog.records] == [False, True, False]


def test_a_peer_s_text_is_cut_and_makes_no_line_of_its_own() -> None:
    assert shown("plain text, gr\u00fc\u00dfe") == "plain text, gr\u00fc\u00dfe"
    assert shown("a\nb\r\x1b[2J\u2028\\n") == "a\\nb\\r\\x1b[2J\\u2028\\\\n"
    assert shown("x" * 200) == "x" * 200
    assert shown("x" * 2000) == "x" * 200 + "..."
