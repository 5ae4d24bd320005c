"""Ways for a test to wait: for a condition, for quiet, on a clock of its own."""

import functools
from collections.abc import Callable
from typing import cast

import anyio
import anyio.lowlevel
import pytest
import trio.abc
import trio.lowlevel
import trio.testing


async def until(condition: Callable[[], object]) -> None:
    """Let others run until `condition` holds. Worker threads may be busy: quiet proves nothing."""
    with anyio.fail_after(10):
        while not condition():
            await anyio.lowlevel.checkpoint()


def jump(seconds: float) -> None:
    """Move the virtual clock."""
    cast(trio.testing.MockClock, trio.lowlevel.current_clock()).jump(seconds)


def _on(clock: Callable[[], trio.abc.Clock], name: str) -> pytest.MarkDecorator:
    backend = pytest.param(("trio", {"clock": clock}), id=name)
    return pytest.mark.parametrize("anyio_backend", [backend], indirect=True)


#: The clock stands still until somebody jumps.
on_a_still_clock = _on(trio.testing.MockClock, "still")
#: The clock jumps to the next deadline when nothing else can happen. Not with worker threads.
on_a_jumping_clock = _on(functools.partial(trio.testing.MockClock, autojump_threshold=0), "jumping")
