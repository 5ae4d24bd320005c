"""Sessions run on both event loops."""

import pytest


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"debug": True}), id="asyncio"),
        pytest.param(("trio", {"restrict_keyboard_interrupt_to_checkpoints": True}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Tests marked `anyio` run on both."""
    return request.param
