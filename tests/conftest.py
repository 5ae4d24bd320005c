"""What every test may use. The root comes last on the path, for `fuzz`: an installed wheel wins."""

import sys
from pathlib import Path

import pytest

from spec.vectors import Vector, Violation, load

sys.path.append(str(Path(__file__).parents[1]))

VALID, INVALID = load()


@pytest.fixture(params=VALID, ids=lambda vector: vector.name)
def vector(request: pytest.FixtureRequest) -> Vector:
    return request.param


@pytest.fixture(params=INVALID, ids=lambda violation: violation.name)
def violation(request: pytest.FixtureRequest) -> Violation:
    return request.param


@pytest.fixture
def valid() -> dict[str, Vector]:
    return {vector.name: vector for vector in VALID}
