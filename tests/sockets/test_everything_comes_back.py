"""Thousands of cancellations and hundreds of restarts on real sockets: all that was taken is given back.

CI runs a part; `nox -s torture` runs 10,000 cancellations and 200 restarts, and prints what it measured.
"""

import contextlib
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from adp_client import BackoffConfig, Client, ClientConfig, Timeouts
from client.support import cancel_at, leftovers

from .inside import inside
from .process import running

IS_FULL = bool(os.environ.get("ADP_TORTURE"))
CANCELS = 10_000 if IS_FULL else 400
RESTARTS = 200 if IS_FULL else 12  # in this process
PROCESSES = 20 if IS_FULL else 2
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1800 if IS_FULL else 60)]

NAMESPACE = bytes(range(32))
QUICK = BackoffConfig(initial_seconds=0.001, cap_seconds=0.01)
PATIENT = Timeouts(connect_seconds=60, exist_seconds=60, idle_ping_seconds=60, release_seconds=60)
SIZE = 300_000
KEYS = [b"key %02d" % number for number in range(4)]
PAGES = [bytes([number + 1]) * SIZE for number in range(4)]
#: What a run may have learnt for good (caches, warm allocator arenas); a leak of one view of a page for each
#: hundred calls would be more.
TOLERANCE_BYTES = 24 << 20


@attrs.frozen(kw_only=True)
class Taken:
    """What this process has in hand."""

    sockets: int
    tasks: int
    threads: int
    memory_bytes: int = attrs.field(eq=False)

    @classmethod
    def now(cls) -> "Taken":
        gc.collect()
        sockets = 0
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):  # the one of this listing
                sockets += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")  # noqa: PTH115
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            sockets=sockets,
            tasks=len(anyio.get_running_tasks()),
            threads=threading.active_count(),
            memory_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        )


def compare(before: Taken, after: Taken, what: str) -> None:
    grown = after.memory_bytes - before.memory_bytes
    print(f"\n{what}: {before} -> {after}; {grown / 1024:.0f} KiB more")
    assert (after.sockets, after.tasks) == (before.sockets, before.tasks)
    # Idle worker threads are kept for a while by both backends; a bounded number of them.
    assert after.threads <= before.threads + 12
    assert grown < TOLERANCE_BYTES


def assert_at_rest(client: Client) -> None:
    """Nothing is pending, nothing is in the window, no queue holds anything."""
    assert leftovers(client) == []
    epoch = client._link.epoch  # type: ignore[union-attr]
    assert epoch is not None
    core = epoch._connection
    assert epoch.open_count == 0
    assert (epoch._landing, epoch._sending, epoch._fences) == (None, None, 0)
    assert (core.in_flight, core._window.requests, core._window.inflight_bytes) == (0, 0, 0)


def verbs(client: Client, chooser: random.Random) -> Callable[[], Any]:
    memory = [bytearray(SIZE) for _ in range(2)]
    return chooser.choice(
        [
            lambda: client.exist(NAMESPACE, KEYS),
            lambda: client.read(NAMESPACE, KEYS[:2], memory),
            lambda: client.write(NAMESPACE, [b"spare"], memory[:1]),
            lambda: client.delete(NAMESPACE, [b"absent"]),
            lambda: client.check(NAMESPACE, KEYS[:1]),
            lambda: client.fence(),
            lambda: client.ping(),
        ]
    )


async def use(client: Client) -> None:
    """Every verb once, and right."""
    memory = [bytearray(SIZE) for _ in KEYS]
    assert (await client.write(NAMESPACE, KEYS, PAGES)).is_all_ok
    assert (await client.read(NAMESPACE, KEYS, memory)).is_all_ok
    assert memory == PAGES
    assert (await client.exist(NAMESPACE, KEYS)).is_all_ok
    await client.fence()


async def test_b25_cancelled_calls_give_everything_back(tmp_path: Path) -> None:
    """Alone, and sixteen at a time."""
    chooser = random.Random(25)
    async with inside(tmp_path) as served:
        config = ClientConfig(endpoint=str(served.endpoint), timeouts=PATIENT, backoff=QUICK)
        async with Client(config) as client:

            async def storm(count: int) -> None:
                for _ in range(count // 2):
                    await cancel_at(verbs(client, chooser)(), chooser.randrange(1, 6))
                for _ in range(count // 32):
                    async with anyio.create_task_group() as tasks:
                        for _ in range(16):
                            tasks.start_soon(cancel_at, verbs(client, chooser)(), chooser.randrange(1, 6))
                await use(client)

            await storm(320)
            assert_at_rest(client)
            held = {**served.held(), "leases": 0}
            before = Taken.now()
            await storm(CANCELS)
            assert_at_rest(client)
            while served.held() != held:
                await anyio.lowlevel.checkpoint()
            compare(before, Taken.now(), f"{CANCELS} calls")
            assert client.stats().connections_lost == 0
        await served.all_left()


async def test_restarts_under_load_give_everything_back(tmp_path: Path) -> None:
    """The server and its store end and begin again under a client that always has calls under way."""
    chooser = random.Random(8)
    config = ClientConfig(endpoint=f"unix://{tmp_path}/s", timeouts=PATIENT, backoff=QUICK)
    async with Client(config) as client:
        boots = set()

        async def restart(count: int) -> None:
            for _ in range(count):
                async with inside(tmp_path, grace_seconds=0) as served:
                    await use(client)
                    assert client.gateway is not None
                    boots.add(client.gateway.boot_id)
                    async with anyio.create_task_group() as tasks:
                        for _ in range(4):
                            tasks.start_soon(cancel_at, verbs(client, chooser)(), chooser.randrange(1, 6))
                    await client.fence()  # what cancelled calls had asked has been answered
                    assert_at_rest(client)
                    assert served.server.counters.sessions == 1
                while client.is_connected:
                    await anyio.lowlevel.checkpoint()

        await restart(3)
        before = Taken.now()
        await restart(RESTARTS)
        compare(before, Taken.now(), f"{RESTARTS} restarts")
        assert len(boots) == RESTARTS + 3
        assert client.stats().boots_seen == RESTARTS + 3


async def test_b22_killed_processes_are_followed(tmp_path: Path) -> None:
    """`kill -9` and start again, with the same data, under one client."""
    listen = f"unix://{tmp_path}/s"
    config = ClientConfig(endpoint=listen, timeouts=PATIENT, backoff=QUICK)
    async with Client(config) as client:
        taken: list[Taken] = []
        for _ in range(PROCESSES + 1):
            with running(tmp_path / "data", listen=(listen,)) as served:
                await use(client)
                assert_at_rest(client)
                taken.append(Taken.now())
                os.kill(served.process.pid, signal.SIGKILL)
                served.process.wait()
            while client.is_connected:
                await anyio.lowlevel.checkpoint()
        compare(taken[0], taken[-1], f"{PROCESSES} killed processes")
        assert client.stats().boots_seen == PROCESSES + 1
    check = [sys.executable, "-m", "adp_gateway", "check", "--data", str(tmp_path / "data")]
    assert (await anyio.run_process(check, check=False)).returncode == 0
