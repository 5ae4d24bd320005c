"""Errors, keys, window, state table and receive buffer, each alone."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_client.protocol import ErrorCode, ObjectKey, Role, errors
from adp_client.protocol.buffer import DISCARD_BYTES, MAX_VIEWS, SCRATCH_BYTES, ReceiveBuffer
from adp_client.protocol.errors import (
    ConfigError,
    ConnectFailed,
    LinkLost,
    LinkRefused,
    LocalProtocolError,
    Overloaded,
    ProtocolError,
    request_error,
)
from adp_client.protocol.keys import check_namespace
from adp_client.protocol.messages import ReadItem, read_items
from adp_client.protocol.state import TRANSITIONS, Machine, State, Step
from adp_client.protocol.window import Window


def test_codes_and_exceptions_are_a_bijection() -> None:
    codes = {code for code in ErrorCode if code is not ErrorCode.OK and not code.ends_connection}
    assert set(errors.REQUEST_ERRORS) == codes
    for code, cls in errors.REQUEST_ERRORS.items():
        made = request_error(code)
        assert type(made) is cls
        assert made.code is code
        assert str(made) == code.name
    subclasses = set(errors.RequestError.__subclasses__())
    assert subclasses == set(errors.REQUEST_ERRORS.values())


def test_overloaded_says_when_to_come_back() -> None:
    error = request_error(ErrorCode.OVERLOADED, retry_after_ms=250)
    assert isinstance(error, Overloaded)
    assert error.retry_after == 0.25


def test_errors_say_what_they_know() -> None:
    with pytest.raises(TypeError):
        ProtocolError("abstract")
    assert ConfigError(("a @ $.b", "c @ $.d")).problems == ("a @ $.b", "c @ $.d")
    assert str(ConnectFailed("tcp://h:1", "refused")) == "cannot reach tcp://h:1: refused"
    assert LinkLost("reset", epoch=3, maybe_applied=True).maybe_applied
    assert LinkRefused(ErrorCode.UNAUTHENTICATED, "no").code is ErrorCode.UNAUTHENTICATED


def test_keys_keep_the_whole_hash() -> None:
    key = ObjectKey(block_hash=bytes(range(64)), group=3, shard=1)
    raw = key.to_bytes()
    assert raw == bytes(range(64)) + b"\0\0\0\3" + b"\0\0\0\1"
    assert ObjectKey.from_bytes(raw) == key


@pytest.mark.parametrize("raw", [b"", b"12345678", b"x" * 129])
def test_not_a_key(raw: bytes) -> None:
    with pytest.raises(LocalProtocolError):
        ObjectKey.from_bytes(raw)


def test_a_key_in_bounds() -> None:
    for bad in ({"block_hash": b""}, {"block_hash": b"x" * 121}, {"group": -1}, {"shard": 1 << 32}):
        with pytest.raises(ValueError, match=r"block_hash|group|shard"):
            ObjectKey(**{"block_hash": b"h", "group": 0, **bad})
    assert check_namespace(bytes(32)) == bytes(32)
    with pytest.raises(LocalProtocolError):
        check_namespace(bytes(31))


def test_window() -> None:
    window = Window(2, 100)
    window.open(60)
    assert window.fits(40)
    assert not window.fits(41)
    with pytest.raises(LocalProtocolError):
        window.take(41)
    window.open(0)
    assert not window.fits(0)
    with pytest.raises(LocalProtocolError):
        window.open(0)
    window.close(60)
    assert (window.requests, window.inflight_bytes) == (1, 0)
    with pytest.raises(LocalProtocolError):
        window.open(101)
    window.resize(1, 10)
    assert not window.fits(0)


def test_a_credit_binds_what_is_new() -> None:
    window = Window(3, 100)
    window.credit(2, 30)
    assert window.fits(100)  # nothing is in flight: no credit is too small for ever
    assert not window.fits(101)
    window.open(50)
    assert not window.fits(0)
    window.take(50)  # what has begun may be finished
    window.close(100)
    window.open(10)
    window.open(20)
    assert (window.requests, window.inflight_bytes) == (2, 30)
    assert not window.fits(0)
    window.credit(3, 100)
    assert window.fits(70)


@pytest.mark.parametrize("credit", [(0, 10), (4, 10), (1, 101)])
def test_a_credit_is_within_the_window(credit: tuple[int, int]) -> None:
    window = Window(3, 100)
    with pytest.raises(LocalProtocolError, match="credit"):
        window.credit(*credit)
    assert window.fits(100)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("step", Step)
def test_every_state_and_step(role: Role, state: State, step: Step) -> None:
    machine = Machine(role)
    machine.state = state
    following = TRANSITIONS[role][state].get(step)
    assert machine.allows(step) is (following is not None)
    if following is None:
        with pytest.raises(LocalProtocolError, match="cannot") as caught:
            machine.take(step)
        assert caught.value.code is ErrorCode.UNEXPECTED_MESSAGE
        assert machine.state is state
    else:
        machine.take(step)
        assert machine.state is following


def test_every_state_can_be_reached_and_left() -> None:
    for table in TRANSITIONS.values():
        assert set(table) == set(State)
        reached = {following for steps in table.values() for following in steps.values()}
        assert reached | {State.START} == set(State)


def _fill(buffer: ReceiveBuffer, raw: bytes) -> None:
    rest = memoryview(raw)
    while rest:
        count = 0
        for view in buffer.views():
            size = min(len(view), len(rest))
            view[:size] = rest[:size]
            rest, count = rest[size:], count + size
        buffer.received(count)


@given(
    raw=st.binary(min_size=1, max_size=400),
    head=st.integers(0, 40),
    sizes=st.lists(st.integers(0, 60), max_size=8),
    dropped=st.integers(0, 255),
    together=st.integers(0, 400),
)
def test_bytes_land_where_they_were_aimed(
    raw: bytes, head: int, sizes: list[int], dropped: int, together: int
) -> None:
    raw = raw * 4
    head = min(head, len(raw))
    buffer = ReceiveBuffer()
    arrived = min(max(together, head), len(raw))
    _fill(buffer, raw[:arrived])
    peeked = buffer.peek(head)
    assert peeked is not None
    assert bytes(peeked) == raw[:head]
    del peeked
    buffer.consume(head)
    memory = [bytearray(size) for size in sizes]
    wanted = [
        size if dropped >> index & 1 else memoryview(m)
        for index, (size, m) in enumerate(zip(sizes, memory, strict=True))
    ]
    total = sum(sizes)
    raw += bytes(max(0, head + total - len(raw)))
    buffer.aim(wanted)
    _fill(buffer, raw[arrived : head + total] if arrived < head + total else b"")
    assert buffer.is_filled
    at = head
    for size, place, target in zip(sizes, memory, wanted, strict=True):
        assert bytes(place) == (bytes(size) if isinstance(target, int) else raw[at : at + size])
        at += size
    buffer.drop_targets()
    rest = max(0, arrived - head - total)
    left = buffer.peek(rest)
    assert left is not None
    assert bytes(left) == raw[head + total : head + total + rest]


def test_scratch_grows_for_a_body_and_shrinks_again() -> None:
    buffer = ReceiveBuffer()
    size = 3 * SCRATCH_BYTES
    assert buffer.peek(size) is None
    _fill(buffer, b"x" * size)
    assert buffer.peek(size) is not None
    buffer.consume(size)
    assert len(buffer.views()[0]) == SCRATCH_BYTES
    assert buffer.is_empty


def test_a_full_scratch_makes_room_by_itself() -> None:
    buffer = ReceiveBuffer()
    _fill(buffer, b"x" * SCRATCH_BYTES)
    buffer.consume(SCRATCH_BYTES - 10)
    assert buffer.peek(20) is None
    _fill(buffer, b"y" * 10)
    whole = buffer.peek(20)
    assert whole is not None
    assert bytes(whole) == b"x" * 10 + b"y" * 10


def test_discarding_takes_no_memory_of_that_size() -> None:
    buffer = ReceiveBuffer()
    buffer.aim([10 * DISCARD_BYTES + 1])
    views = buffer.views()
    assert sum(map(len, views)) == 10 * DISCARD_BYTES + 1
    assert len({id(view.obj) for view in views}) == 1


def test_views_stay_below_the_system_limit() -> None:
    buffer = ReceiveBuffer()
    memory = [bytearray(1) for _ in range(2 * MAX_VIEWS)]
    buffer.aim([memoryview(m) for m in memory])
    assert len(buffer.views()) == MAX_VIEWS
    _fill(buffer, b"z" * 2 * MAX_VIEWS)
    assert buffer.is_filled
    assert b"".join(memory) == b"z" * 2 * MAX_VIEWS


def test_buffer_knows_how_much_of_its_targets_is_left() -> None:
    buffer = ReceiveBuffer()
    buffer.views()[0][:3] = b"abc"
    buffer.received(3)
    target = bytearray(5)
    buffer.aim([memoryview(target), 4])
    assert buffer.left_bytes == 6
    buffer.received(3)
    assert (buffer.left_bytes, buffer.is_filled) == (3, False)
    buffer.received(3)
    assert (buffer.left_bytes, buffer.is_filled) == (0, True)
    buffer.aim([7])
    buffer.drop_targets()
    assert buffer.left_bytes == 0


def test_read_items_by_column_are_the_items() -> None:
    rows = [ReadItem(index=4 + at, object_bytes=7, length=7, checksum=at) for at in range(3)]
    items = read_items(rows)
    assert list(items) == rows
    assert items[1] == rows[1]
    assert read_items(items) is items
    assert items.is_whole
    assert items.is_run
    for change in ({"index": 9}, {"index": 4}):
        assert not read_items([*rows[:2], attrs.evolve(rows[2], **change)]).is_run
    for change in ({"status": ErrorCode.CORRUPT}, {"offset": 1}, {"length": 6}):
        assert not read_items([*rows[:2], attrs.evolve(rows[2], **change)]).is_whole
    assert not read_items([]).is_run
