"""`async with` for what serves in a task group."""

import abc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Self

import anyio
import anyio.abc


class Served(abc.ABC):
    """Enter it, and it has a task group of its own; leave, and all that serves is cancelled. An error of the
    body is raised as it is, not in a group."""

    @abc.abstractmethod
    def serve_in(self, tasks: anyio.abc.TaskGroup) -> None:
        """Instead of `async with`: have somebody else's group run the sessions."""

    async def __aenter__(self) -> Self:
        self._life = self._live()
        await self._life.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> bool | None:
        return await self._life.__aexit__(*exc_info)  # type: ignore[arg-type]

    @asynccontextmanager
    async def _live(self) -> AsyncGenerator[None]:
        error: Exception | None = None
        async with anyio.create_task_group() as tasks:
            self.serve_in(tasks)
            try:
                yield
            except Exception as exc:
                error = exc  # raised below, outside of the group
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
