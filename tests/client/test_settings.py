"""The strict door for configuration, endpoints, backoff, replay, batches: all pure."""

import itertools
import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_client import BackoffConfig, Client, ClientConfig, Timeouts, TLSConfig
from adp_client.backoff import Backoff
from adp_client.batches import check_keys, cut, group_by_width, max_batch_bytes, max_batch_items
from adp_client.errors import ConfigError, LocalProtocolError
from adp_client.operations import slice_views
from adp_client.protocol.constants import Opcode
from adp_client.protocol.messages import Limits
from adp_client.replay import MAYBE_APPLIED, Fate, fate
from adp_client.structuring import structure
from adp_client.transport import TCPEndpoint, TLSEndpoint, UnixEndpoint, parse_endpoint


def test_plain_data_becomes_frozen_types():
    config = structure(
        {
            "endpoint": "unix:///run/adp.sock",
            "token": "s3cret",
            "timeouts": {"exist_seconds": 1},
            "backoff": {"jitter": 0.5},
            "verify_payloads": False,
        },
        ClientConfig,
    )
    assert config == ClientConfig(
        endpoint="unix:///run/adp.sock",
        token="s3cret",
        timeouts=Timeouts(exist_seconds=1.0),
        backoff=BackoffConfig(jitter=0.5),
        verify_payloads=False,
    )
    assert "s3cret" not in repr(config)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.endpoint = "x"


def test_none_stands_for_what_is_optional():
    assert structure({"endpoint": "tcp://h:1", "token": None}, ClientConfig).token is None


def test_a_token_is_in_no_problem():
    with pytest.raises(ConfigError) as caught:
        structure({"endpoint": "tcp://h:1", "token": 271828}, ClientConfig)
    assert caught.value.problems == ("not of the right kind (it is not shown) @ $.token",)


def test_every_problem_is_told_at_once_with_its_path():
    with pytest.raises(ConfigError) as caught:
        structure(
            {
                "endpoint": "http://gateway",
                "tokn": "x",
                "token": 3,
                "verify_payloads": "false",
                "timeouts": {"connect_seconds": "1", "exist_seconds": -1, "request_seconds": True, "what": 1},
                "backoff": {"initial_seconds": 9},
            },
            ClientConfig,
        )
    by_path = dict(reversed(problem.rsplit(" @ ", 1)) for problem in caught.value.problems)
    assert by_path == {
        "$.endpoint": "'http://gateway' is none of tcp://HOST:PORT, tls://HOST:PORT and unix:///PATH",
        "$.tokn": "unknown key (allowed: backoff, endpoint, timeouts, tls, token, verify_payloads)",
        "$.token": "not of the right kind (it is not shown)",
        "$.verify_payloads": "expected true or false, not 'false'",
        "$.timeouts.connect_seconds": "expected a number, not '1'",
        "$.timeouts.exist_seconds": "exist_seconds must be > 0: -1.0",
        "$.timeouts.request_seconds": "expected a number, not True",
        "$.timeouts.what": by_path["$.timeouts.what"],
        "$.backoff": "cap_seconds is less than initial_seconds",
    }
    assert by_path["$.timeouts.what"].startswith("unknown key (allowed: connect_seconds, ")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({}, "required, and missing @ $.endpoint"),
        ([], "expected a table of settings, not [] @ $"),
        ({"endpoint": "tcp://h:1", "timeouts": None}, "expected a table of settings, not None @ $.timeouts"),
        (
            {"endpoint": "tcp://h:1", "timeouts": {"exist_seconds": float("nan")}},
            "expected a number, not nan @ $.timeouts.exist_seconds",
        ),
        (
            {"endpoint": "tcp://h:1", "timeouts": {"exist_seconds": 10**400}},
            "expected a number, not one beyond every float @ $.timeouts.exist_seconds",
        ),
        ({"endpoint": "tcp://h:1", 3: 4}, None),
        (
            {"endpoint": "tcp://h:1", "tls": {}},
            "tls is for endpoints tls://HOST:PORT; 'tcp://h:1' is not one @ $",
        ),
        (
            {"endpoint": "unix:///h", "tls": {"ca_file": "ca.pem"}},
            "tls is for endpoints tls://HOST:PORT; 'unix:///h' is not one @ $",
        ),
        (
            {"endpoint": "tls://h:1", "tls": {"key_file": "key.pem"}},
            "certificate_file and key_file go together @ $.tls",
        ),
        (
            {"endpoint": "tls://h:1", "tls": {"server_name": ".example"}},
            "'.example' is not the name of a host @ $.tls.server_name",
        ),
        (
            {"endpoint": "tls://h:1", "tls": {"verify": False}},
            "unknown key (allowed: ca_file, certificate_file, key_file, server_name) @ $.tls.verify",
        ),
        ({"endpoint": "tls://h:1", "tls": {"ca_file": 3}}, "expected text, not 3 @ $.tls.ca_file"),
    ],
)
def test_single_problems(raw, problem):
    with pytest.raises(ConfigError) as caught:
        structure(raw, ClientConfig)
    assert len(caught.value.problems) == 1
    assert problem is None or caught.value.problems == (problem,)


def test_a_value_is_shown_as_far_as_a_person_reads_it():
    nested: object = 1
    for _ in range(5000):
        nested = [nested]
    for raw in (nested, "x" * 5000, 1 << 50000):
        with pytest.raises(ConfigError) as caught:
            structure({"endpoint": "tcp://h:1", "timeouts": raw}, ClientConfig)
        (problem,) = caught.value.problems
        assert problem.startswith("expected a table of settings, not ")
        assert len(problem) < 300


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Timeouts(exist_seconds="2"), "exist_seconds must be a number, not '2'"),
        (lambda: Timeouts(request_seconds=True), "request_seconds must be a number, not True"),
        (lambda: Timeouts(connect_seconds=None), "connect_seconds must be a number, not None"),
        (lambda: Timeouts(connect_seconds=float("nan")), "connect_seconds"),
        (lambda: BackoffConfig(jitter="half"), "jitter must be a number, not 'half'"),
        (lambda: BackoffConfig(factor=False), "factor must be a number, not False"),
        (lambda: BackoffConfig(initial_seconds=9), "cap_seconds is less than initial_seconds"),
        (lambda: ClientConfig(endpoint=b"tcp://h:1"), "endpoint must be text, not b'tcp://h:1'"),
        (
            lambda: ClientConfig(endpoint="tcp://h:1", token=b"secret"),
            "token must be text or None, not bytes",
        ),
        (lambda: ClientConfig(endpoint="tcp://h:1", token="s" * 40_000), "token must have at most 32768"),
        (lambda: ClientConfig(endpoint="tcp://h:1", token="\ud800"), "token must be text that can be sent"),
        (lambda: ClientConfig(endpoint="foo"), "'foo' is none of tcp://HOST:PORT, tls://"),
        (lambda: ClientConfig(endpoint=5), "endpoint must be text, not 5"),
        (
            lambda: ClientConfig(endpoint="tcp://h:1", timeouts={"exist_seconds": 1}),
            "timeouts must be a Timeouts, not dict",
        ),
        (
            lambda: ClientConfig(endpoint="tcp://h:1", backoff=None),
            "backoff must be a BackoffConfig, not NoneType",
        ),
        (
            lambda: ClientConfig(endpoint="tcp://h:1", verify_payloads="no"),
            "verify_payloads must be True or False, not str",
        ),
        (lambda: ClientConfig(endpoint="tls://h:1", tls={}), "tls must be a TLSConfig or None, not dict"),
        (lambda: Timeouts(exist_seconds=0), "exist_seconds must be > 0: 0"),
        (lambda: TLSConfig(ca_file=3), "ca_file must be the path of a file, as text, not 3"),
        (lambda: TLSConfig(key_file=""), "key_file must be the path of a file, as text, not ''"),
        (lambda: TLSConfig(server_name=b"host"), "b'host' is not the name of a host"),
    ],
)
def test_a_config_made_by_hand_is_checked_too(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    (problem,) = caught.value.problems
    assert problem.startswith(words)
    assert "secret" not in problem


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("tcp://127.0.0.1:7171", TCPEndpoint(host="127.0.0.1", port=7171)),
        ("tcp://gateway.example:1", TCPEndpoint(host="gateway.example", port=1)),
        ("tcp://[::1]:65535", TCPEndpoint(host="::1", port=65535)),
        ("tls://gateway.example:7171", TLSEndpoint(host="gateway.example", port=7171)),
        ("tls://[::1]:7171", TLSEndpoint(host="::1", port=7171)),
        ("unix:///run/adp/gateway.sock", UnixEndpoint(path="/run/adp/gateway.sock")),
    ],
)
def test_endpoints_both_ways(text, endpoint):
    assert parse_endpoint(text) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is none of"),
        ("gateway:7171", "is none of"),
        ("udp://host:1", "is none of"),
        ("tcp://", "no port"),
        ("tcp://host", "no port"),
        ("tcp://127.0.0.1", "no port"),
        ("tcp://[::1]", "no port"),
        ("tcp://host:", "the port must be a number"),
        ("tcp://:7171", "no host"),
        ("tcp://host:http", "the port must be a number"),
        ("tcp://host:65536", "the port must be a number"),
        ("tcp://host:-1", "the port must be a number"),
        ("tcp://host:٣", "the port must be a number"),
        ("tcp://host:" + "9" * 5000, "the port must be a number"),
        ("tcp://::1:7171", "in brackets"),
        ("tcp://[[]]:1", "no brackets"),
        ("tcp://two words:1", "no spaces"),
        ("tcp://nul\0:1", "a host has"),
        ("tcp://h\u00f6st:1", "ASCII"),
        ("tcp://user:password@host:1", "no user and password"),
        ("tls://user@host:1", "no user and password"),
        ("tls://", "no port"),
        ("tls://host", "no port"),
        ("tls://host:0x1", "the port must be a number"),
        ("tls:///path", "no port"),
        ("unix://relative.sock", "must be absolute"),
        ("unix:///" + "x" * 107, "at most 107 bytes"),
        ("unix:///nul\0", "path is text"),
        ("unix:///\ud800", "path is text"),
    ],
)
def test_endpoints_that_are_none(text, words):
    with pytest.raises(ValueError, match=words) as caught:
        parse_endpoint(text)
    assert type(caught.value) is ValueError, "a sentence, not an accident"
    assert "password@" not in str(caught.value)
    with pytest.raises(ConfigError, match=words):
        ClientConfig(endpoint=text)


def test_a_client_refuses_settings_that_do_not_go_together():
    """However its configuration was made: somebody would believe that the connection is safe."""
    with pytest.raises(ConfigError, match="tls is for endpoints tls://"):
        Client(ClientConfig(endpoint="tcp://h:1", tls=TLSConfig()))
    with pytest.raises(ConfigError, match="go together"):
        Client(ClientConfig(endpoint="tls://h:1", tls=TLSConfig(certificate_file="me.pem")))
    Client(ClientConfig(endpoint="tls://h:1"))


def test_b37_jitter_comes_after_the_cap():
    config = BackoffConfig(initial_seconds=1, factor=3, cap_seconds=10, jitter=0.5)
    backoff = Backoff(config, random.Random(1))
    delays = [backoff.next_delay_seconds() for _ in range(200)]
    for delay, most in zip(delays, [1, 3, 9, *[10] * 197], strict=True):
        assert most / 2 <= delay <= most
    assert len(set(delays[3:])) == 197
    assert max(delays) - min(delays[3:]) > 4
    backoff.reset()
    assert backoff.next_delay_seconds() <= 1


@given(st.integers(0, 60), st.floats(1, 100), st.floats(0.001, 10), st.floats(0, 1))
def test_delays_stay_in_their_bounds(attempts, factor, initial, jitter):
    config = BackoffConfig(initial_seconds=initial, factor=factor, cap_seconds=20, jitter=jitter)
    backoff = Backoff(config, random.Random(attempts))
    for _ in range(attempts):
        assert 0 <= backoff.next_delay_seconds() <= 20


def test_fates_of_lost_requests():
    assert set(MAYBE_APPLIED) == {
        Opcode.EXIST,
        Opcode.READ,
        Opcode.WRITE,
        Opcode.CHECK,
        Opcode.DELETE,
        Opcode.FENCE,
        Opcode.PING,
    }
    for verb, once_sent in MAYBE_APPLIED.items():
        assert fate(verb, was_sent=False, replays=9) is Fate.REPLAY
        assert fate(verb, was_sent=True, replays=0) is once_sent
        assert fate(verb, was_sent=True, replays=1) is Fate.FAIL
    assert [verb.name for verb, once in MAYBE_APPLIED.items() if once is Fate.FAIL] == [
        "DELETE",
        "FENCE",
        "PING",
    ]


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 7), st.integers(1, 60))
def test_cuts_are_exact_covers_within_their_limits(sizes, max_items, max_bytes):
    items = range(len(sizes))
    runs = list(cut(items, sizes.__getitem__, max_items=max_items, max_bytes=max_bytes))
    assert [item for run in runs for item in run] == list(items)
    for run in runs:
        assert 1 <= len(run) <= max_items
        assert len(run) == 1 or sum(sizes[item] for item in run) <= max_bytes
    for run, following in itertools.pairwise(runs):
        is_full = len(run) == max_items
        assert is_full or sum(sizes[item] for item in run) + sizes[following[0]] > max_bytes


@given(st.lists(st.binary(min_size=1, max_size=4), max_size=30))
def test_groups_have_one_width_and_lose_nothing(keys):
    groups = group_by_width(keys, range(len(keys)))
    assert sorted(item for group in groups for item in group) == list(range(len(keys)))
    for group in groups:
        assert len({len(keys[item]) for item in group}) <= 1


def test_batch_limits_leave_room_for_at_least_one_item():
    tiny = Limits(max_body_bytes=10, max_items=3, max_inflight_bytes=2)
    assert max_batch_items(tiny, 128, 24) == 1
    assert max_batch_bytes(tiny) == 1
    assert max_batch_items(Limits(), 40, 0) == 16384
    assert max_batch_bytes(Limits()) == 64 << 20


@pytest.mark.parametrize("key", [b"", b"k" * 129, "text", bytearray(b"k"), None])
def test_keys_that_are_none(key):
    with pytest.raises(LocalProtocolError):
        check_keys([b"fine", key])


@given(st.lists(st.binary(max_size=9), max_size=8), st.data())
def test_slices_of_pieces_are_slices_of_the_whole(pieces, data):
    whole = b"".join(pieces)
    offset = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - offset))
    found = slice_views([memoryview(piece) for piece in pieces], offset, length)
    assert b"".join(found) == whole[offset : offset + length]
