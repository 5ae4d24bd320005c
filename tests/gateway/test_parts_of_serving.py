"""The pieces that a session is made of, each by itself."""

import itertools
import random
from collections.abc import Sequence
from itertools import pairwise

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_client.protocol.codec import encode_body
from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import Credit, Limits, ReadItem, ReadReply
from adp_gateway.admission import Admission, request_bytes
from adp_gateway.buffers import ALIGN_BYTES, Arena, Block, lay_out
from adp_gateway.credits import Credits
from adp_gateway.fences import Fences
from adp_gateway.replies import (
    FIRST_PORTION_BYTES,
    PORTION_BYTES,
    Found,
    cut_extents,
    joined,
    portions,
    read_frames,
    status_replies,
)
from adp_gateway.store.base import Extent

from .waiting import until

# ---------------------------------------------------------------- admission


def test_admission_keeps_its_budget() -> None:
    admission = Admission(100)
    assert admission.admit(60)
    assert admission.admit(40)
    assert not admission.admit(1)
    admission.leave(60)
    assert admission.admit(60)
    assert admission.used_bytes == 100
    assert admission.refused == 1


def test_admission_takes_anybody_when_nothing_is_under_way() -> None:
    admission = Admission(100)
    assert admission.admit(request_bytes(16384, 128))
    assert not admission.admit(0)
    admission.leave(request_bytes(16384, 128))
    assert admission.admit(1)


# ---------------------------------------------------------------- fences


def test_a_fence_waits_for_what_came_before_and_holds_what_comes_after() -> None:
    fences = Fences()
    reached: list[str] = []
    first, second = fences.enter(), fences.enter()
    fences.bar(lambda: reached.append("one"))
    third = fences.enter()
    fences.bar(lambda: reached.append("two"))
    fences.bar(lambda: reached.append("three"))
    fourth = fences.enter()
    assert first is second
    assert [era.is_open for era in (first, third, fourth)] == [True, False, False]
    fences.leave(first)
    assert reached == []
    fences.leave(second)
    assert reached == ["one"]
    assert [era.is_open for era in (third, fourth)] == [True, False]
    fences.leave(third)
    assert reached == ["one", "two", "three"]
    assert fourth.is_open
    assert not fences.is_idle
    fences.leave(fourth)
    assert fences.is_idle


def test_a_fence_with_nothing_before_it_is_reached_at_once() -> None:
    fences = Fences()
    reached: list[int] = []
    fences.bar(lambda: reached.append(1))
    fences.bar(lambda: reached.append(2))
    assert reached == [1, 2]
    assert fences.current.is_open


def test_who_owes_frames_before_the_fence() -> None:
    fences = Fences()
    era = fences.enter()
    era.asking += 1
    assert not fences.is_asking_before_current
    fences.bar(lambda: None)
    assert fences.is_asking_before_current
    era.asking -= 1
    assert not fences.is_asking_before_current


@pytest.mark.anyio
async def test_wait_idle_returns_when_the_last_request_has_left() -> None:
    fences = Fences()
    await fences.wait_idle()
    first, second = fences.enter(), fences.enter()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fences.wait_idle)
        await anyio.wait_all_tasks_blocked()
        fences.leave(first)
        await anyio.wait_all_tasks_blocked()
        assert not fences.is_idle
        fences.leave(second)


# ---------------------------------------------------------------- replies


@given(
    sizes=st.lists(st.integers(0, 300), max_size=20),
    failed=st.integers(0, 10),
    max_payload_bytes=st.integers(1, 200),
    max_body_bytes=st.integers(64, 400),
)
def test_read_frames_cover_every_byte_once_and_keep_the_limits(
    sizes: list[int], failed: int, max_payload_bytes: int, max_body_bytes: int
) -> None:
    refused = [ReadItem(index=1000 + n, status=ErrorCode.NOT_FOUND) for n in range(failed)]
    indices = tuple(range(len(sizes)))
    found = Found(indices, tuple(sizes), indices)
    frames = list(
        read_frames(refused, found, max_payload_bytes=max_payload_bytes, max_body_bytes=max_body_bytes)
    )
    begun: dict[int, int] = {}
    for frame in frames:
        assert frame
        assert len(encode_body(ReadReply(items=frame))) <= max_body_bytes
        assert sum(item.length for item in frame) <= max_payload_bytes
        for item in frame:
            assert item.offset == begun.get(item.index, 0)
            begun[item.index] = item.offset + item.length
            if 0 < item.object_bytes <= max_payload_bytes:
                assert item.length == item.object_bytes, "an object that fits a frame is not cut"
    assert {index: begun.get(index) for index in range(len(sizes))} == dict(enumerate(sizes))
    assert sum(item.status is ErrorCode.NOT_FOUND for frame in frames for item in frame) == failed


@given(st.binary(max_size=300), st.integers(17, 200))
def test_status_replies_cover_every_item_once(statuses: bytes, max_body_bytes: int) -> None:
    replies = status_replies(statuses, max_body_bytes=max_body_bytes)
    assert b"".join(reply.statuses for reply in replies) == statuses
    assert [reply.first for reply in replies] == [
        sum(len(before.statuses) for before in replies[:number]) for number in range(len(replies))
    ]
    assert all(16 + len(reply.statuses) <= max_body_bytes for reply in replies)
    assert replies


@given(st.dictionaries(st.integers(0, 9999), st.integers(0, 20 << 20), max_size=50))
def test_portions_are_bounded_and_keep_the_order(lengths: dict[int, int]) -> None:
    cut = list(portions(lengths))
    assert [index for portion in cut for index in portion] == list(lengths)
    for number, portion in enumerate(cut):
        limit = PORTION_BYTES if number else FIRST_PORTION_BYTES
        assert len(portion) == 1 or sum(lengths[index] for index in portion) <= limit


def test_portions_of_many_small_items() -> None:
    assert [len(portion) for portion in portions(dict.fromkeys(range(1100), 0))] == [
        512,
        512,
        76,
    ]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.data())
def test_cut_extents(lengths: list[int], data: st.DataObject) -> None:
    extents = [Extent(number, 1000 * number, length) for number, length in enumerate(lengths)]
    cells = _cells(extents)
    start = data.draw(st.integers(0, len(cells)))
    end = data.draw(st.integers(start, len(cells)))
    cut = cut_extents(extents, start, end - start)
    assert _cells(cut) == cells[start:end]
    assert all(e.length for e in cut)


@given(st.lists(st.tuples(st.integers(3, 4), st.integers(0, 6), st.integers(1, 3)), max_size=12))
def test_joined_extents_are_the_same_bytes_in_no_more_pieces_than_needed(
    places: list[tuple[int, int, int]],
) -> None:
    extents = [Extent(*place) for place in places]
    found = joined(extents)
    assert _cells(found) == _cells(extents)
    assert all(
        (one.fd, one.offset + one.length) != (other.fd, other.offset) for one, other in pairwise(found)
    )


def _cells(extents: Sequence[Extent]) -> list[tuple[int, int]]:
    return [(extent.fd, extent.offset + at) for extent in extents for at in range(extent.length)]


# ---------------------------------------------------------------- buffers


@given(st.lists(st.integers(0, 100_000), max_size=30))
def test_lay_out_aligns_and_does_not_overlap(lengths: list[int]) -> None:
    starts, total = lay_out(lengths)
    at = 0
    for start, length in zip(starts, lengths, strict=True):
        assert start >= at
        assert start % (4096 if length >= 16384 else 64) == 0
        at = start + length
    assert at <= total
    assert total % ALIGN_BYTES == 0


def test_arena_against_a_model() -> None:
    """Blocks never overlap, are aligned, and everything comes back whole, in any order."""
    for seed in range(20):
        rng = random.Random(seed)
        arena = Arena(1 << 20)
        blocks: list[Block] = []
        for _ in range(300):
            if rng.random() < 0.55:
                block = arena.take_nowait(rng.randrange(1, 200_000))
                if block is not None:
                    blocks.append(block)
                    if rng.random() < 0.3:
                        blocks.append(block.split(rng.randrange(0, block.length // 4096 + 1) * 4096))
            elif blocks:
                blocks.pop(rng.randrange(len(blocks))).release()
            taken = sorted((block.start, block.length) for block in blocks if block.length)
            assert all(start % ALIGN_BYTES == 0 for start, _ in taken)
            assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(taken))
            assert arena.used_bytes == sum(length for _, length in taken)
        for block in blocks:
            block.release()
            block.release()  # harmless
        assert arena.used_bytes == 0
        whole = arena.take_nowait(1 << 20)
        assert whole is not None
        view = whole.view(0, 1 << 20)
        view[:5] = b"bytes"
        assert bytes(view[:6]) == b"bytes\0"


@pytest.mark.anyio
async def test_arena_serves_in_order_and_the_urgent_first() -> None:
    arena = Arena(10 * 4096)
    held = await arena.take(10 * 4096)
    order: list[str] = []

    async def want(name: str, pages: int, *, is_urgent: bool = False) -> None:
        block = await arena.take(pages * 4096, is_urgent=is_urgent)
        order.append(name)
        block.release()

    async with anyio.create_task_group() as tasks:
        for waiting, (name, pages) in enumerate((("large", 9), ("small", 1)), 1):
            tasks.start_soon(want, name, pages)
            await until(lambda waiting=waiting: arena.waiting == waiting)  # type: ignore[misc]
        assert arena.take_nowait(4096) is None
        async with anyio.create_task_group() as others:
            others.start_soon(lambda: want("urgent", 10, is_urgent=True))
            await until(lambda: arena.waiting == 3)
            held.release()
    assert order[0] == "urgent"
    assert sorted(order[1:]) == ["large", "small"]
    assert arena.used_bytes == 0


@pytest.mark.anyio
@pytest.mark.parametrize("granted_first", [False, True])
async def test_arena_cancelled_before_and_in_the_moment_of_the_grant(granted_first: bool) -> None:
    arena = Arena(4096)
    held = await arena.take(4096)
    taken: list[Block] = []

    async def want() -> None:
        taken.append(await arena.take(4096))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(want)
        await until(lambda: arena.waiting)
        if granted_first:
            held.release()
        tasks.cancel_scope.cancel()
    held.release()
    # A grant that nobody could take has come back; one that was taken is whole.
    assert arena.waiting == 0
    assert arena.used_bytes == 4096 * len(taken)


@pytest.mark.anyio
async def test_arena_refuses_what_it_can_never_give() -> None:
    with pytest.raises(ValueError, match="arena of 4096"):
        await Arena(4096).take(4097)


def test_credits_are_shares_of_one_budget_and_seldom_told() -> None:
    limits = Limits(max_requests=256, max_inflight_bytes=1 << 20)
    credits = Credits(inflight_bytes=4 << 20, requests=1024, limits=limits)
    told: dict[int, list[Credit]] = {number: [] for number in range(1000)}
    tells = {number: told[number].append for number in told}
    for number in range(4):
        credits.join(tells[number])
    assert not any(told.values())  # a quarter of the budget is as much as WELCOME says
    for number in range(4, 1000):
        credits.join(tells[number])
        assert len(told[0]) <= number.bit_length()
    assert credits.share == Credit(requests=1, inflight_bytes=4096)
    assert all(shares[-1] == credits.share for shares in told.values())
    for number in range(1000):
        credits.leave(tells[number])
        credits.leave(tells[number])
    assert credits.connections == 0
    assert credits.share == Credit(requests=256, inflight_bytes=1 << 20)
    assert len(told[999]) <= 12
