"""Every seed and every kept input, through every target, without atheris."""

import pytest

from fuzz.seeds import corpus, seeds
from fuzz.targets import TARGETS, sealed, unsealed


@pytest.mark.parametrize("target", TARGETS)
def test_replay(target: str) -> None:
    inputs = [*seeds(), *corpus(target)]
    assert len(inputs) > 100
    for data in inputs:
        TARGETS[target](data)


def test_sealing_is_undone() -> None:
    whole = [data[1:] for data in seeds() if data[:1] == b"\x1f" and len(data) > 1]
    assert len(whole) > 50
    assert all(unsealed(sealed(data)) == data for data in whole)


def test_an_unknown_target_has_no_corpus() -> None:
    with pytest.raises(ValueError, match="unknown target"):
        corpus("nothing")
