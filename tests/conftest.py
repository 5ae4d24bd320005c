import pytest

from spec.vectors import Vector, Violation, load

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
