"""A gateway of several real processes."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from adp_client import BackoffConfig, Client, ClientConfig, SharedRegion
from adp_client.placing import workers_of as workers_of_keys
from adp_client.protocol.workers import WorkerMap, decode_worker_map
from adp_client.testing import check_gateway_contract
from adp_client.transport import TCPEndpoint, Transport, UnixEndpoint, connect, parse_endpoint
from gateway.peer import Peer

from .process import Gateway, gateway, running

NAMESPACE = bytes(range(32))

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


def workers_of(served: Gateway) -> dict[int, int]:
    """Worker -> process id, from what the kernel says of the parent's children."""
    pid = served.process.pid
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"--worker" in words:
            found[json.loads(words[words.index(b"--worker") + 1])["worker"]] = int(child)
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    """What other processes do shows in nothing that could be waited for."""
    while not condition():
        time.sleep(0.02)


async def told_by(endpoint: str) -> tuple[WorkerMap, bytes]:
    peer = Peer(await connect(parse_endpoint(endpoint)))
    welcome = await peer.open()
    await peer.transport.aclose()
    told = decode_worker_map(welcome.extensions)
    assert told is not None
    return told, welcome.boot_id


def place(endpoint: str, told: WorkerMap, worker: int) -> str:
    at = parse_endpoint(endpoint)
    if isinstance(at, UnixEndpoint):
        return f"unix://{Path(at.path).with_name(told.places[worker].name)}"
    assert isinstance(at, TCPEndpoint)
    return f"tcp://{at.host}:{told.places[worker].port}"


async def test_every_worker_is_where_every_other_says(tmp_path):
    listen = ("tcp://127.0.0.1:0", f"unix://{tmp_path}/s")
    async with gateway(tmp_path / "kv", "--workers", "3", listen=listen) as served:
        assert sorted(workers_of(served)) == [0, 1, 2]
        boots = {}
        for endpoint in served.endpoints:
            told, _ = await told_by(endpoint)
            for worker in range(3):
                again, boot_id = await told_by(place(endpoint, told, worker))
                assert again == told
                assert again.worker == worker
                assert boots.setdefault(worker, boot_id) == boot_id
        assert len(set(boots.values())) == 3
        status, errors = served.stop()
        assert status == 0, errors
        assert not list(tmp_path.glob("s*"))
    async with gateway(tmp_path / "kv", "--workers", "3", listen=listen) as served:
        again, _ = await told_by(served.endpoints[1])
        assert again == told  # the id is the directory's


async def test_a_worker_keeps_the_gateway_contract(tmp_path):
    async with gateway(
        tmp_path / "kv", "--workers", "2", "--max-object", "1MiB", listen=(f"unix://{tmp_path}/s",)
    ) as served:

        async def dial() -> Transport:
            return await connect(parse_endpoint(f"{served.endpoints[0]}.1"))

        report = await check_gateway_contract(dial, seconds=30)
        assert report.is_kept, report
        passed = {result.id for result in report.results if result.verdict.name == "PASSED"}
        assert "4.5-workers" in passed


async def test_a_dead_worker_comes_back_where_it_was(tmp_path):
    async with gateway(tmp_path / "kv", "--workers", "2") as served:
        told, _ = await told_by(served.endpoints[0])
        before = await told_by(place(served.endpoints[0], told, 1))
        pids = workers_of(served)
        os.kill(pids[1], signal.SIGKILL)
        after = await told_by(place(served.endpoints[0], told, 1))  # waits for it, and is not refused
        assert after[0] == before[0]
        assert after[0].worker == 1
        assert after[1] != before[1]
        assert workers_of(served)[0] == pids[0]
        status, errors = served.stop()
        assert status == 0, errors
        assert "worker 1 died (signal 9): starting it again" in errors


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_one_worker_is_killed_under_load_and_the_others_go_on(tmp_path, scheme):
    """Its keys are misses until it is back with all that it had; those of the others are always there."""
    listen = "tcp://127.0.0.1:0" if scheme == "tcp" else f"unix://{tmp_path}/s"
    keys = [b"key-%04d" % at for at in range(300)]
    places = workers_of_keys(keys, 3)
    backoff = BackoffConfig(cap_seconds=0.2)
    async with gateway(tmp_path / "kv", "--workers", "3", listen=(listen,)) as served:
        config = ClientConfig(endpoint=served.endpoints[0], backoff=backoff)
        async with Client(config) as client:
            assert (await client.wait_connected()).workers == 3
            assert (await client.write(NAMESPACE, keys, [key * 500 for key in keys])).is_all_ok
            region = SharedRegion.create(300 * 4000) if scheme == "unix" else None
            memory = bytearray(300 * 4000) if region is None else region.memory
            buffers = [
                memoryview(memory)[at * 4000 :][:4000] if region is None else region.slice(at * 4000, 4000)
                for at in range(300)
            ]

            async def misses() -> set[int]:
                """The workers whose objects are not there; what is there is right."""
                memory[:] = bytes(len(memory))
                result = await client.read(NAMESPACE, keys, buffers)
                for at, status in enumerate(result.statuses):
                    assert status in (0, 1)
                    assert status or memory[at * 4000 :][:4000] == keys[at] * 500
                found = {places[at] for at, status in enumerate(result.statuses) if status}
                told = await client.exist(NAMESPACE, keys)
                assert {places[at] for at, status in enumerate(told.statuses) if status} <= {1}
                return found

            assert await misses() == set()
            for _ in range(2):
                os.kill(workers_of(served)[1], signal.SIGKILL)
                seen: list[set[int]] = [set()]
                with anyio.fail_after(30):
                    while seen[-1] or {1} not in seen:
                        seen.append(await misses())
                assert {worker for missing in seen for worker in missing} == {1}
                assert (await client.write(NAMESPACE, keys[:30], [key * 500 for key in keys[:30]])).is_all_ok
                await client.fence()
            if region is not None:
                buffers.clear()
                region.close()
        status, errors = served.stop()
        assert status == 0, errors
        assert errors.count("worker 1 died (signal 9)") == 2
    async with (
        gateway(tmp_path / "kv", "--workers", "3", listen=(listen,)) as served,
        Client(ClientConfig(endpoint=served.endpoints[0])) as client,
    ):
        await client.wait_connected()
        assert (await client.exist(NAMESPACE, keys)).is_all_ok


async def test_a_gateway_with_a_worker_that_stays_down_says_so_when_it_ends(tmp_path):
    data = tmp_path / "kv"
    async with gateway(data, "--workers", "2") as served:
        (data / "worker-1-of-2" / "superblock").write_bytes(b"not what it was")
        os.kill(workers_of(served)[1], signal.SIGKILL)
        wait_for(lambda: served.log.read_text().count("worker 1 died (status 3)") >= 2)
        await told_by(served.endpoints[0])  # the other one serves
        status, errors = served.stop()
        assert status == 1, errors


def test_a_gateway_that_cannot_start_all_its_workers_does_not_start(tmp_path):
    data = tmp_path / "kv"
    with running(data, "--workers", "2") as served:
        assert served.stop()[0] == 0
    (data / "worker-1-of-2" / "superblock").write_bytes(b"not what it was")
    with (
        pytest.raises(AssertionError, match=r"(?s)not ready, status 3.*worker 1 cannot start: status 3"),
        running(data, "--workers", "2"),
    ):
        pass


def test_another_number_of_workers_is_refused_with_one_line(tmp_path):
    with running(tmp_path / "kv", "--workers", "2") as served:
        assert served.stop()[0] == 0
    for workers in ("3", "1"):
        with (
            pytest.raises(AssertionError, match="made with --workers 2"),
            running(tmp_path / "kv", "--workers", workers),
        ):
            pass


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_second_signal_cuts_all_workers(tmp_path, number, expected):
    async with gateway(tmp_path / "kv", "--workers", "2", "--grace", "100") as served:
        told, _ = await told_by(served.endpoints[0])
        peers = []
        for worker in range(2):
            peer = Peer(await connect(parse_endpoint(place(served.endpoints[0], told, worker))))
            await peer.open()
            peers.append(peer)
            served.peers.append(peer)
        served.process.send_signal(number)
        for peer in peers:
            while not peer.notices:
                await peer.event()
        status, errors = served.stop(number)
        assert status == expected, errors


async def test_workers_do_not_outlive_their_parent(tmp_path):
    async with gateway(tmp_path / "kv", "--workers", "2", listen=(f"unix://{tmp_path}/s",)) as served:
        pids = list(workers_of(served).values())
        served.stop(signal.SIGKILL)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    async with gateway(tmp_path / "kv", "--workers", "2", listen=(f"unix://{tmp_path}/s",)) as served:
        assert len(workers_of(served)) == 2


def test_two_gateways_do_not_share_a_directory(tmp_path):
    with running(tmp_path / "kv", "--workers", "2"):
        for workers in ("2", "1"):
            listen = (f"unix://{tmp_path}/other",)
            words = "in use by another gateway" if workers == "2" else "made with --workers 2"
            with (
                pytest.raises(AssertionError, match=words),
                running(tmp_path / "kv", "--workers", workers, listen=listen),
            ):
                pass
