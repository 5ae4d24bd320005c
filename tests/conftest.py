"""What every test may rely on: both event loops, hypothesis profiles, the published vectors."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from spec.vectors import Vector, Violation, load

ROOT = Path(__file__).parents[1]
VALID, INVALID = load()

# The packages under test are the installed ones; what else the checkout has (bench, demo, fuzz) is found
# last, so that the checkout never shadows the wheel.
sys.path.append(str(ROOT))

hypothesis.settings.register_profile("dev", max_examples=50, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=300, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"debug": True}), id="asyncio"),
        pytest.param(("trio", {"restrict_keyboard_interrupt_to_checkpoints": True}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """Tests marked `anyio` run on both. A virtual `clock` is given by what makes it: one for each test.

    One that is shared starts where the test before left it, and there 1 + 1.5 + 1 + 1.5 need not be 5.
    """
    name, options = request.param
    return name, {key: value() if key == "clock" else value for key, value in options.items()}


@pytest.fixture(autouse=True)
def logging_as_found() -> Iterator[None]:
    """What a command's entry point does to the process's logging ends with the test that ran it."""
    logger = logging.getLogger("adp_gateway")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(params=VALID, ids=lambda vector: vector.name)
def vector(request: pytest.FixtureRequest) -> Vector:
    return request.param


@pytest.fixture(params=INVALID, ids=lambda violation: violation.name)
def violation(request: pytest.FixtureRequest) -> Violation:
    return request.param


@pytest.fixture
def valid() -> dict[str, Vector]:
    return {vector.name: vector for vector in VALID}
