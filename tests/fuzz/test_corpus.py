"""Every seed and every kept input, through every target, without atheris; and what the targets run with."""

import logging

import pytest

from fuzz.__main__ import TARGETS as NAMES
from fuzz.coverage import MAX_INPUT_BYTES, Run, table
from fuzz.dictionaries import FOLDER, MAX_WORD_BYTES, dictionaries, dictionary_of
from fuzz.images import ADDED, base, mutated
from fuzz.sealing import sealed, unsealed
from fuzz.seeds import ROOT, corpus, seeds
from fuzz.targets import TARGETS

MOST_FILES = 150


@pytest.fixture(autouse=True)
def quiet():
    """Recovery warns about each damaged image."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("target", TARGETS)
def test_replay(target: str) -> None:
    inputs = [*seeds(target), *corpus(target)]
    assert len(inputs) > 20
    for data in inputs:
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_is_small(target: str) -> None:
    sizes = [path.stat().st_size for path in (ROOT / "corpus" / target).iterdir()]
    assert 0 < len(sizes) <= MOST_FILES
    assert max(sizes) <= MAX_INPUT_BYTES


def test_there_is_no_corpus_without_its_target() -> None:
    assert {path.name for path in (ROOT / "corpus").iterdir()} == set(TARGETS) == set(NAMES)
    with pytest.raises(ValueError, match="unknown target"):
        corpus("nothing")


def test_sealing_is_undone() -> None:
    whole = [data[1:] for data in seeds("frames") if data[:1] == b"\x1f" and len(data) > 1]
    assert len(whole) > 50
    assert all(unsealed(sealed(data)) == data for data in whole)


def test_dictionaries_are_what_the_code_says() -> None:
    """If not: python -m fuzz.dictionaries"""
    found = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert found == dictionaries()
    for text in found.values():
        words = [line.partition("=")[2] for line in text.splitlines()]
        assert all(2 < len(word) <= 4 * MAX_WORD_BYTES + 2 for word in words)
    assert {dictionary_of(target).name for target in TARGETS} == found.keys()


def test_the_valid_image_is_whole() -> None:
    """What is mutated is a store with several segments, and with nothing in it that a mutation adds."""
    image = mutated(b"")
    assert image == {name: bytearray(contents) for name, contents in base().files.items()}
    assert sum(name.endswith(".log") for name in image) >= 3
    assert not any(ADDED in contents for contents in image.values())


def test_the_table_says_how_fast_and_where_findings_are() -> None:
    runs = [
        Run(target="frames", executions=120_000, per_second=2000, is_clean=True, log=""),
        Run(target="config", executions=0, per_second=0, is_clean=False, log=""),
    ]
    head, first, second = table(runs)
    assert head.split() == ["target", "executions", "per", "second", "result"]
    assert first.split() == ["frames", "120,000", "2,000", "nothing", "found"]
    assert second.split() == ["config", "0", "0", "FOUND:", "see", "fuzz/findings/config/"]
