"""The way from an engine's threads to the one event loop that owns a client.

Engines call from threads that must never wait. `submit` appends to a deque and writes an eventfd (about a
microsecond, however busy the loop is); a task of the loop drains the deque and starts each call as a task of
its own. What came of a call is handed to `deliver`, in the loop's thread, exactly once: its value, its error,
or the news that time ran out or the bridge closed. When it is delivered, the memory that the call used is the
caller's again.

A bridge belongs to the process that made it: threads do not survive a fork, so make it after the fork.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import anyio
import attrs

from .errors import BridgeClosed

logger = logging.getLogger(__name__)


class Connectable(Protocol):
    """All that the bridge itself wants to know of a client."""

    @property
    def is_connected(self) -> bool:
        """Whether a call made now would find a link."""
        ...


@attrs.frozen(kw_only=True)
class Outcome:
    """What came of one submitted call: `error` is None exactly when `value` counts."""

    tag: Any
    value: Any = None
    error: BaseException | None = None


@attrs.frozen(kw_only=True)
class _Call:
    tag: Any
    run: Callable[[Any], Awaitable[Any]]
    timeout_seconds: float


class Bridge:
    """One thread that runs an event loop with one client.

    `connect` makes the client's async context manager, inside the thread. `deliver` must not block or raise;
    it is called from the loop's thread, and from the closing thread for calls that were never started.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Connectable]],
        deliver: Callable[[Outcome], None],
        *,
        name: str,
        backend: Literal["asyncio", "trio"] = "asyncio",
    ) -> None:
        self._connect = connect
        self._deliver = deliver
        self._backend = backend
        self._inbox: deque[_Call] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._client: Connectable | None = None
        self._closing = False
        self._drain_seconds = 0.0
        self._under_way = 0
        self._idle: anyio.Event | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        """Whether the gateway can be reached right now. Never waits; any thread."""
        client = self._client
        return client is not None and client.is_connected

    def submit(self, run: Callable[[Any], Awaitable[Any]], *, tag: Any, timeout_seconds: float) -> None:
        """Have `run(client)` awaited by the loop; its outcome carries `tag`. Never waits; any thread.

        After `timeout_seconds` in the loop the call is cancelled and delivered as a TimeoutError. After
        `close` the call is delivered at once as BridgeClosed. Raises RuntimeError in a forked process.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("this bridge belongs to the parent process: make one after the fork")
        with self._lock:
            refused = self._closing
            if not refused:
                self._inbox.append(_Call(tag=tag, run=run, timeout_seconds=timeout_seconds))
                os.eventfd_write(self._wake, 1)
        if refused:
            self._deliver(Outcome(tag=tag, error=BridgeClosed("the bridge is closed")))

    def close(self, timeout_seconds: float, *, drain_seconds: float = 0.0) -> None:
        """Finish: give calls under way `drain_seconds`, fail the rest; the thread ends in `timeout_seconds`.

        Idempotent. In a forked process it only lets go of the descriptor.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            first = not self._closing
            self._closing = True
            self._drain_seconds = drain_seconds
            if first:
                os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_seconds)
        self._fail_waiting(BridgeClosed("the bridge is closed"))
        if first and not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend=self._backend)
        except BaseException:
            # A bug of ours, or a client that cannot even be built: the engine goes on without the gateway.
            logger.exception("the connection to the gateway ended for good; going on without it")
            with self._lock:
                self._closing = True
            self._fail_waiting(BridgeClosed("the bridge ended with an error"))
        finally:
            self._client = None

    async def _main(self) -> None:
        async with self._connect() as client:
            self._client = client
            async with anyio.create_task_group() as calls:
                while True:
                    await anyio.wait_readable(self._wake)
                    os.eventfd_read(self._wake)
                    while self._inbox:
                        self._under_way += 1
                        calls.start_soon(self._perform, client, self._inbox.popleft())
                    if self._closing and not self._inbox:
                        break
                with anyio.move_on_after(self._drain_seconds):
                    if self._under_way:
                        self._idle = idle = anyio.Event()
                        await idle.wait()
                calls.cancel_scope.cancel()

    async def _perform(self, client: Connectable, call: _Call) -> None:
        outcome = Outcome(tag=call.tag, error=BridgeClosed("the bridge closed while the call was under way"))
        try:
            with anyio.fail_after(call.timeout_seconds):
                outcome = Outcome(tag=call.tag, value=await call.run(client))
        except Exception as error:
            # Whatever it is belongs to the one who submitted the call: nobody else's calls may end with it.
            outcome = Outcome(tag=call.tag, error=error)
        finally:
            self._under_way -= 1
            self._deliver(outcome)
            if self._idle is not None and not self._under_way:
                self._idle.set()

    def _fail_waiting(self, error: BridgeClosed) -> None:
        while True:
            try:
                call = self._inbox.popleft()
            except IndexError:
                return
            self._deliver(Outcome(tag=call.tag, error=error))
