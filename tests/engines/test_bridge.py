import os
import threading
from contextlib import asynccontextmanager

import anyio
import pytest

from adp_engines.bridge import Bridge, Outcome
from adp_engines.errors import BridgeClosed


class Inbox:
    """Outcomes as they are delivered, with a way to wait for them that has a deadline."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._changed = threading.Condition()

    def __call__(self, outcome: Outcome) -> None:
        with self._changed:
            self.outcomes.append(outcome)
            self._changed.notify_all()

    def wait(self, count: int) -> list[Outcome]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outcomes) >= count, 10)
            return list(self.outcomes)


class Client:
    def __init__(self) -> None:
        self.is_connected = True
        self.entered = threading.Event()

    @asynccontextmanager
    async def connect(self):
        self.entered.set()
        yield self


@pytest.fixture(params=["asyncio", "trio"])
def backend(request):
    return request.param


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def inbox():
    return Inbox()


@pytest.fixture
def bridge(client, inbox, backend):
    bridge = Bridge(client.connect, inbox, name="bridge", backend=backend)
    yield bridge
    bridge.close(10)
    assert not bridge._thread.is_alive()


async def value_of(client) -> str:
    await anyio.lowlevel.checkpoint()
    return "value"


async def forever(client) -> None:
    await anyio.sleep_forever()


async def fail(client) -> None:
    raise OSError("no")


def test_value_comes_back_with_its_tag(bridge, inbox) -> None:
    bridge.submit(value_of, tag=1, timeout_seconds=10)
    assert inbox.wait(1) == [Outcome(tag=1, value="value")]


def test_each_call_is_delivered_exactly_once(bridge, inbox) -> None:
    for tag in range(500):
        bridge.submit(value_of if tag % 2 else fail, tag=tag, timeout_seconds=10)
    inbox.wait(500)
    bridge.close(10)
    assert sorted(outcome.tag for outcome in inbox.outcomes) == list(range(500))
    assert {outcome.tag % 2 for outcome in inbox.outcomes if outcome.error is None} == {1}


def test_error_of_one_call_is_its_own(bridge, inbox) -> None:
    bridge.submit(fail, tag="bad", timeout_seconds=10)
    bridge.submit(value_of, tag="good", timeout_seconds=10)
    by_tag = {outcome.tag: outcome for outcome in inbox.wait(2)}
    assert isinstance(by_tag["bad"].error, OSError)
    assert by_tag["good"].value == "value"


def test_slow_call_does_not_hold_up_others_and_times_out(bridge, inbox) -> None:
    bridge.submit(forever, tag="slow", timeout_seconds=0.05)
    bridge.submit(value_of, tag="quick", timeout_seconds=10)
    first, second = inbox.wait(2)
    assert (first.tag, second.tag) == ("quick", "slow")
    assert isinstance(second.error, TimeoutError)


def test_close_fails_what_is_under_way_and_what_comes_after(bridge, inbox, client) -> None:
    started = threading.Event()

    async def hang(client) -> None:
        started.set()
        await anyio.sleep_forever()

    bridge.submit(hang, tag="under way", timeout_seconds=100)
    assert started.wait(10)
    bridge.close(10)
    bridge.submit(value_of, tag="after", timeout_seconds=10)
    assert [(outcome.tag, type(outcome.error)) for outcome in inbox.outcomes] == [
        ("under way", BridgeClosed),
        ("after", BridgeClosed),
    ]
    bridge.close(10)


def test_close_can_let_calls_end(bridge, inbox) -> None:
    started, may_end = threading.Event(), threading.Event()

    async def write(client) -> str:
        started.set()
        await anyio.to_thread.run_sync(may_end.wait, 10)
        return "written"

    bridge.submit(write, tag=1, timeout_seconds=100)
    assert started.wait(10)
    closing = threading.Thread(target=bridge.close, args=(10,), kwargs={"drain_seconds": 10})
    closing.start()
    may_end.set()
    closing.join(10)
    assert inbox.outcomes == [Outcome(tag=1, value="written")]


def test_connected_only_while_the_client_is(client, inbox, backend) -> None:
    bridge = Bridge(client.connect, inbox, name="bridge", backend=backend)
    bridge.submit(value_of, tag=1, timeout_seconds=10)
    inbox.wait(1)
    assert bridge.is_connected
    client.is_connected = False
    assert not bridge.is_connected
    client.is_connected = True
    bridge.close(10)
    assert not bridge.is_connected


def test_client_that_cannot_be_built_fails_calls_and_nothing_else(inbox, backend, caplog) -> None:
    @asynccontextmanager
    async def broken():
        raise RuntimeError("a bug of ours")
        yield

    bridge = Bridge(broken, inbox, name="bridge", backend=backend)
    bridge.submit(value_of, tag=1, timeout_seconds=10)
    (outcome,) = inbox.wait(1)
    assert isinstance(outcome.error, BridgeClosed)
    assert not bridge.is_connected
    bridge.close(10)
    assert "going on without it" in caplog.text


def test_fork_is_noticed(bridge, client, monkeypatch) -> None:
    assert client.entered.wait(10)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="parent process"):
            bridge.submit(value_of, tag=1, timeout_seconds=1)
        bridge.close(0)  # the child lets go without touching the parent's thread
    assert bridge._thread.is_alive()
