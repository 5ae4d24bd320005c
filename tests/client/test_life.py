"""Entering, leaving, errors of the body, wrong use, restarts, refusals, draining (B34, B35, W7)."""

import logging
import os
import threading

import anyio
import pytest

from adp_client import Client, ClientConfig
from adp_client.errors import ConnectFailed, LinkClosed, LinkRefused
from adp_client.protocol.constants import CRITICAL_EXTENSION, ErrorCode
from adp_client.protocol.messages import Extension, Goodbye, Read, Welcome
from adp_client.testing import MemoryGateway, Session
from client.support import ENDPOINT, NAMESPACE, QUICK, connected

pytestmark = pytest.mark.anyio
CONFIG = ClientConfig(endpoint=ENDPOINT, backoff=QUICK)


class BodyError(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [BodyError("mine"), ExceptionGroup("mine", [BodyError()]), TimeoutError(), KeyboardInterrupt("mine")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("is_up", [True, False])
async def test_the_bodys_own_error_comes_out_as_it_was_raised(error, is_up):
    gateway = MemoryGateway()
    gateway.is_down = not is_up

    async def body() -> None:
        async with Client(CONFIG, dial=gateway.dial) as client:
            if is_up:
                await client.wait_connected()
            raise error

    async with gateway:
        with pytest.raises(type(error)) as caught:
            await body()
        assert caught.value is error


async def test_cancellation_of_the_body_is_cancellation():
    async with MemoryGateway() as gateway:
        with anyio.CancelScope() as scope:
            async with Client(CONFIG, dial=gateway.dial) as client:
                await client.wait_connected()
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught


async def test_a_bug_in_the_background_ends_the_body_and_is_not_in_a_group():
    async def buggy(endpoint):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with Client(CONFIG, dial=buggy):
            await anyio.sleep_forever()


async def test_a_bug_and_an_error_of_the_body_are_both_kept():
    async def buggy(endpoint):
        raise ZeroDivisionError

    async def body() -> None:
        async with Client(CONFIG, dial=buggy):
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
            raise BodyError

    with pytest.raises(ExceptionGroup) as caught:
        await body()
    assert [type(exc) for exc in caught.value.exceptions] == [BodyError, ZeroDivisionError]


async def test_leaving_says_goodbye():
    async with MemoryGateway() as gateway:
        async with Client(CONFIG, dial=gateway.dial) as client:
            await client.wait_connected()
        assert isinstance(gateway.sessions[0].requests[-1].message, Goodbye)
        assert client.stats().connections_lost == 0


async def test_after_close_every_verb_says_so():
    async with connected() as (client, _):
        pass
    with pytest.raises(LinkClosed):
        await client.exist(NAMESPACE, [b"k"])
    with pytest.raises(LinkClosed):
        await client.ping()
    assert not client.is_connected
    with pytest.raises(RuntimeError, match="once"):
        async with client:
            pass


async def test_before_entering():
    client = Client(CONFIG)
    with pytest.raises(RuntimeError, match="async with"):
        await client.exist(NAMESPACE, [b"k"])
    assert client.gateway is None
    assert not client.is_connected


async def test_b35_another_thread_is_told_the_rule():
    problems: list[Exception] = []

    def elsewhere(client: Client) -> None:
        try:
            anyio.run(client.exist, NAMESPACE, [b"k"])
        except Exception as exc:
            problems.append(exc)

    async with connected() as (client, _):
        thread = threading.Thread(target=elsewhere, args=(client,))
        thread.start()
        thread.join()
        assert (await client.exist(NAMESPACE, [b"k"])).count_ok == 0
    assert [type(problem) for problem in problems] == [RuntimeError]
    assert "thread and process" in str(problems[0])


async def test_b35_after_fork_the_child_is_told_and_the_parent_goes_on(monkeypatch):
    async with connected() as (client, _):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)  # as a child sees it
            with pytest.raises(RuntimeError, match="after fork"):
                await client.exist(NAMESPACE, [b"k"])
        assert (await client.exist(NAMESPACE, [b"k"])).count_ok == 0


async def test_w7_a_restarted_gateway_is_noticed(caplog):
    caplog.set_level(logging.INFO, "adp_client")
    async with connected() as (client, gateway):
        first = client.gateway
        gateway.cut()  # the same boot: only the network failed
        await client.exist(NAMESPACE, [b"k"])
        assert (client.gateway.boot_id, client.gateway.epoch) == (first.boot_id, 2)
        assert client.stats().boots_seen == 1
        gateway.restart(b"another boot 16!")
        await client.exist(NAMESPACE, [b"k"])
        assert (client.gateway.boot_id, client.gateway.epoch) == (b"another boot 16!", 3)
        assert client.stats().boots_seen == 2
        assert client.stats().connections_lost == 2


async def test_a_wrong_token_fails_verbs_at_once_with_the_gateways_words():
    async with MemoryGateway(token="right") as gateway:
        config = ClientConfig(endpoint=ENDPOINT, backoff=QUICK, token="wrong")
        async with Client(config, dial=gateway.dial) as client:
            with pytest.raises(ConnectFailed, match="wrong token") as caught:
                await client.exist(NAMESPACE, [b"k"])
            assert isinstance(caught.value.__cause__, LinkRefused)
            assert caught.value.__cause__.code is ErrorCode.UNAUTHENTICATED
            gateway.token = "wrong"  # somebody fixes it; the client has kept trying
            while not client.is_connected:
                await anyio.lowlevel.checkpoint()
            assert (await client.exist(NAMESPACE, [b"k"])).count_ok == 0
    assert "wrong" not in repr(config)


class Demanding(Session):
    """Its WELCOME has an extension that must not be skipped, and that nobody knows."""

    async def greet(self, event) -> None:
        extensions = (Extension(tag=CRITICAL_EXTENSION | 7, data=b""),)
        welcome = Welcome(boot_id=bytes(16), limits=self.gateway.limits, extensions=extensions)
        await self.transport.send([self.connection.accept(welcome)])


async def test_a_critical_extension_that_is_unknown_refuses_the_handshake():
    async with MemoryGateway() as gateway, Client(CONFIG, dial=gateway.dial) as client:
        gateway.session_type = Demanding
        while len(gateway.sessions) < 2:
            await anyio.lowlevel.checkpoint()
        assert not client.is_connected
        (said,) = gateway.sessions[0].notices
        assert said.code is ErrorCode.UNSUPPORTED_VERSION
        assert gateway.sessions[0].requests == []
        gateway.session_type = Session
        assert (await client.exist(NAMESPACE, [b"k"])).count_ok == 0


async def test_a_draining_gateway_answers_what_was_sent_and_the_rest_goes_to_the_next_connection():
    go = anyio.Event()

    async def script(session, request) -> bool:
        if isinstance(request.message, Read):
            await go.wait()
        return False

    async with connected() as (client, gateway):
        gateway.put(NAMESPACE, b"k", b"v")
        gateway.script = script
        buffer = bytearray(1)
        results = []

        async def note(verb, *arguments) -> None:
            results.append(await verb(*arguments))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(note, client.read, NAMESPACE, [b"k"], [buffer])
            await anyio.wait_all_tasks_blocked()
            await gateway.sessions[0].send_goodbye()
            await anyio.wait_all_tasks_blocked()
            assert not client.is_connected
            tasks.start_soon(note, client.delete, NAMESPACE, [b"k"])
            await anyio.wait_all_tasks_blocked()
            go.set()
        assert all(result.is_all_ok for result in results)
        assert buffer == b"v"
        assert isinstance(gateway.sessions[0].requests[-1].message, Goodbye)
        assert len(gateway.sessions) == 2
        assert client.stats().replays == 0


async def test_troubles_are_told_once(caplog):
    gateway = MemoryGateway()
    gateway.is_down = True
    async with gateway, Client(CONFIG, dial=gateway.dial) as client:
        while gateway.dials < 20:
            await anyio.lowlevel.checkpoint()
        assert len(caplog.records) == 1
        gateway.is_down = False
        await client.wait_connected()
