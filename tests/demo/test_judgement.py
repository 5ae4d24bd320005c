"""What the demo calls PASS: it must be able to say FAIL."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import anyio
import attrs
import pytest

from adp_client.protocol.constants import ErrorCode
from demo import pages
from demo.processes import Generated
from demo.report import Report
from demo.scenario import Baseline, Settings, compare_pages, key_of, make_histories, outputs_identical

GOOD = Report(
    vllm="0.29.0",
    agents=4,
    prompt_tokens=12_000,
    restored_tokens=11_776,
    restorable_tokens=11_776,
    pages_compared=736,
    pages_identical=736,
    outputs_identical=True,
    recompute_cached_tokens=0,
    ttft_recompute_s=0.8,
    ttft_restore_s=0.1,
    elapsed_s=60.0,
)


def test_everything_right_is_a_pass() -> None:
    assert GOOD.passed
    assert GOOD.to_table().endswith("PASS")
    assert GOOD.to_json()["passed"] is True


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pages_compared": 0, "pages_identical": 0}, "no page was compared"),
        ({"pages_identical": 735}, "1 pages differ or are missing"),
        ({"restored_tokens": 11_648}, "11648 of 11776 restorable tokens came back"),
        ({"outputs_identical": False}, "outputs differ"),
        ({"recompute_cached_tokens": 128}, "128 tokens were still cached"),
    ],
)
def test_anything_wrong_is_a_fail_and_is_named(change: dict[str, object], problem: str) -> None:
    report = attrs.evolve(GOOD, **change)
    assert not report.passed
    assert report.to_table().endswith("FAIL")
    assert any(problem in each for each in report.problems)
    assert problem in report.to_table()


def test_json_has_the_documented_keys() -> None:
    assert {
        "restored_tokens",
        "prompt_tokens",
        "pages_compared",
        "pages_identical",
        "outputs_identical",
        "ttft_recompute_s",
        "ttft_restore_s",
    } <= GOOD.to_json().keys()


# ---------------------------------------------------------------------------------------------------- outputs

ANSWER = Generated(tokens=[5, 6, 7], logprobs=[-1.0, -2.0, -3.0], cached_tokens=0, ttft_seconds=0.1)
BASELINE = Baseline(first=[ANSWER], second_hit=[ANSWER], second_cold=[ANSWER], returning=[[1, 2, 3]])


def test_equal_outputs_are_identical() -> None:
    assert outputs_identical(BASELINE, [ANSWER], [ANSWER])


@pytest.mark.parametrize(
    "other",
    [
        attrs.evolve(ANSWER, tokens=[5, 6, 8]),
        attrs.evolve(ANSWER, logprobs=[-1.0, -2.0, -3.000001]),  # the same split of work: the last bit counts
    ],
)
def test_one_token_or_one_bit_off_is_not_identical(other: Generated) -> None:
    assert not outputs_identical(BASELINE, [ANSWER], [other])
    assert not outputs_identical(BASELINE, [other], [ANSWER])


def test_a_recomputation_may_differ_in_the_last_digits_only() -> None:
    close = attrs.evolve(ANSWER, logprobs=[-1.00001, -2.0, -3.0])
    far = attrs.evolve(ANSWER, logprobs=[-1.001, -2.0, -3.0])
    assert outputs_identical(attrs.evolve(BASELINE, second_cold=[close]), [ANSWER], [ANSWER])
    assert not outputs_identical(attrs.evolve(BASELINE, second_cold=[far]), [ANSWER], [ANSWER])


# ------------------------------------------------------------------------------------------------------ pages

BLOCKS = [
    pages.RecordedBlock(
        block_hash=bytes([n]) * 32, group=0, pages={"layer 0": b"k" * 64, "layer 1": bytes([n]) * 64}
    )
    for n in range(3)
]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    for block in BLOCKS:
        pages.append(tmp_path, block)
    return tmp_path


class Shelf:
    """Answers `read` from a dict, as a client would."""

    def __init__(self) -> None:
        self.objects = {key_of(block): b"".join(block.pages.values()) for block in BLOCKS}

    async def read(
        self, namespace: bytes, keys: Sequence[bytes], buffers: Sequence[bytearray]
    ) -> SimpleNamespace:
        (key,), (buffer,) = keys, buffers
        content = self.objects.get(key)
        if content is None:
            return SimpleNamespace(count_ok=0, statuses=bytes([ErrorCode.NOT_FOUND]), lengths=(0,))
        buffer[: len(content)] = content
        return SimpleNamespace(count_ok=1, statuses=bytes([ErrorCode.OK]), lengths=(len(content),))


def compare(shelf: Shelf, folder: Path) -> tuple[int, int]:
    return anyio.run(compare_pages, shelf, bytes(32), folder)


def test_recorded_pages_come_back_in_order(recorded: Path) -> None:
    assert list(pages.load(recorded)) == BLOCKS


def test_pages_are_compared_one_by_one(recorded: Path) -> None:
    assert compare(Shelf(), recorded) == (6, 6)


def test_one_flipped_bit_costs_one_page(recorded: Path) -> None:
    shelf = Shelf()
    content = bytearray(shelf.objects[key_of(BLOCKS[1])])
    content[70] ^= 1
    shelf.objects[key_of(BLOCKS[1])] = bytes(content)
    assert compare(shelf, recorded) == (6, 5)


def test_a_missing_or_short_object_costs_all_its_pages(recorded: Path) -> None:
    shelf = Shelf()
    del shelf.objects[key_of(BLOCKS[0])]
    shelf.objects[key_of(BLOCKS[2])] = shelf.objects[key_of(BLOCKS[2])][:64]
    assert compare(shelf, recorded) == (6, 2)


# --------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("agents", [2, 4, 9])
def test_histories_do_not_all_fit_but_each_does(agents: int) -> None:
    settings = Settings(agents=agents)
    blocks = settings.history_blocks + 1
    assert blocks <= settings.cache_blocks < agents * blocks
    assert settings.history_tokens % settings.block_tokens != 0
    first_blocks = {
        tuple(history[: settings.block_tokens]) for history in make_histories(settings, vocabulary=1024)
    }
    assert len(first_blocks) == agents
