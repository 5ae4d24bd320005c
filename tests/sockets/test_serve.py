"""`adp-gateway serve` as users run it: a process, sockets, signals."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
from pathlib import Path

import anyio
import pytest

from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import Delete, ErrorMessage, Goodbye, Hello, Read
from gateway.peer import NAMESPACE, Closed, content, key_of

from .process import Gateway, command, gateway, running

pytestmark = pytest.mark.anyio

OK, NOT_FOUND = ErrorCode.OK, ErrorCode.NOT_FOUND
MIB = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    """The process runs asyncio; its clients here may too."""
    return "asyncio"


async def test_every_verb_on_tcp_and_unix(tmp_path: Path) -> None:
    listen = ("tcp://127.0.0.1:0", f"unix://{tmp_path}/s")
    async with gateway(tmp_path / "kv", listen=listen) as served:
        for which in range(2):
            peer = await served.dial(which)
            objects = {key_of(100 * which + n): content(size, seed=n) for n, size in enumerate(SIZES)}
            assert await peer.write(objects) == [OK] * len(objects)
            assert await peer.exist(*objects, key_of(99)) == [OK] * len(objects) + [NOT_FOUND]
            assert await peer.read(*objects) == list(objects.values())
            answer = await peer.call(Delete(namespace=NAMESPACE, keys=tuple(objects)))
            assert answer.statuses == [OK] * len(objects)
            assert await peer.read(*objects) == [None] * len(objects)
            await peer.leave()
        status, errors = served.stop()
    assert status == 0, errors
    assert not Path(f"{tmp_path}/s").exists()  # noqa: ASYNC240


#: around the device's command, and the frame; 864 KiB is a page of a large model
SIZES = [0, 1, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 864 * 1024, 3 * MIB + 5]


async def test_acknowledged_objects_outlive_kill_and_restart(tmp_path: Path) -> None:
    objects = {key_of(n): content(50_000 + n, seed=n) for n in range(64)}
    boot_ids = set()
    async with gateway(tmp_path) as served:
        peer = await served.call()
        boot_ids.add((await peer.open()).boot_id)
        assert await peer.write(objects) == [OK] * 64
        half = await peer.ask_write({key_of(100): content(17 * MIB // 8)}, frames=1)
        assert half
        status, _ = served.stop(signal.SIGKILL)
        assert status == -signal.SIGKILL
    async with gateway(tmp_path) as served:
        peer = await served.call()
        boot_ids.add((await peer.open()).boot_id)
        assert await peer.read(*objects) == list(objects.values())
        status, errors = served.stop()
        assert status == 0
        assert "objects 6" in errors
    assert len(boot_ids) == 2


async def test_b47_sigterm_with_idle_and_busy_clients(tmp_path: Path) -> None:
    """Five idle, one in the middle of reading, one of writing: all is finished, synced and closed in time."""
    data = tmp_path / "kv"
    async with gateway(data, "--grace", "5") as served:
        idle = [await served.dial() for _ in range(5)]
        reader, writer = await served.dial(), await served.dial()
        objects = {key_of(n): content(MIB, seed=n) for n in range(24)}
        assert await reader.write(objects) == [OK] * 24
        asked = await reader.ask(Read(namespace=NAMESPACE, keys=tuple(objects), capacities=(MIB,) * 24))
        written = {key_of(n): content(MIB, seed=n) for n in range(50, 58)}
        asked_to_write = await writer.ask_write(written)
        served.process.send_signal(signal.SIGTERM)
        assert (await reader.answer(asked)).payloads() == list(objects.values())
        statuses = (await writer.answer(asked_to_write)).statuses
        for busy in (reader, writer):
            await busy.closed()
            assert busy.notices == [Goodbye(code=ErrorCode.SHUTTING_DOWN)]
        for peer in idle:
            assert await peer.closed() == [Goodbye(code=ErrorCode.SHUTTING_DOWN)]
        status, errors = served.wait()
        assert status == 0
        assert "cutting" not in errors
        assert "Traceback" not in errors
    done = run(*command(data)[:3], "check", "--data", str(data))
    assert done.returncode == 0
    assert done.stdout.startswith(f"{24 + statuses.count(OK)} whole objects of ")


async def test_grace_is_bounded(tmp_path: Path) -> None:
    """A client that never takes its objects is cut."""
    async with gateway(tmp_path, "--grace", "0.3") as served:
        stuck = await served.dial()
        objects = {key_of(n): content(MIB, seed=n) for n in range(24)}
        await stuck.write(objects)
        await stuck.ask(Read(namespace=NAMESPACE, keys=tuple(objects), capacities=(MIB,) * 24))
        status, errors = served.stop()
        assert status == 0
        assert "the grace time is over" in errors


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_second_signal_cuts(tmp_path: Path, number: int, expected: int) -> None:
    async with gateway(tmp_path, "--grace", "100") as served:
        stuck = await served.dial()
        objects = {key_of(n): content(MIB, seed=n) for n in range(24)}
        await stuck.write(objects)
        await stuck.ask(Read(namespace=NAMESPACE, keys=tuple(objects), capacities=(MIB,) * 24))
        served.process.send_signal(number)
        while not stuck.notices:
            await stuck.event()
        status, errors = served.stop(number)
        assert status == expected, errors
        assert "Traceback" not in errors


async def test_http_and_noise_on_the_port(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        good = await served.dial()
        await good.write({key_of(1): b"fine"})
        for noise in (
            b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\0" * 100,
            b"ADP/\x01\x01" + b"\xff" * 40,
        ):
            bad = await served.call()
            await bad.transport.send([noise])
            bad.connection.hello(Hello())
            (notice,) = await bad.closed()
            assert isinstance(notice, ErrorMessage)
            assert await good.read(key_of(1)) == [b"fine"]
        status, errors = served.stop()
        assert status == 0
        assert errors.count("WARNING") == 2, "one line for each matter"
        assert "BAD_MAGIC" in errors
        assert "BAD_CHECKSUM" in errors


async def test_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("open sesame\n")
    async with gateway(tmp_path / "kv", "--token-file", str(token)) as served:
        with pytest.raises(Closed):
            await served.dial(hello=Hello(token=b"open barley"))
        peer = await served.dial(hello=Hello(token=b"open sesame"))
        assert await peer.exist(key_of(1)) == [NOT_FOUND]
        _, errors = served.stop()
        assert "sesame" not in errors


async def test_tenants_through_a_kill(tmp_path: Path) -> None:
    """One floods, the other keeps all; the quota holds over a restart and is said in the log."""
    (tmp_path / "a.token").write_text("alpha\n")
    (tmp_path / "b.token").write_text("beta\n")
    (tmp_path / "a.token").chmod(0o640)
    (tmp_path / "b.token").chmod(0o644)
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(
        '[tenants.a]\ntoken_file = "a.token"\nquota = "10MiB"\n[tenants.b]\ntoken_file = "b.token"\n'
    )
    others = {key_of(n): content(200_000, seed=n) for n in range(10)}
    async with gateway(tmp_path / "kv", "--tenants", str(tenants)) as served:
        with pytest.raises(Closed):
            await served.dial(hello=Hello(token=b"gamma"))
        b = await served.dial(hello=Hello(token=b"beta"))
        assert await b.write(others) == [OK] * 10
        a = await served.dial(hello=Hello(token=b"alpha"))
        for n in range(100, 130):
            assert await a.write({key_of(n): content(MIB, seed=n)}) == [OK]
        kept = await a.exist(*map(key_of, range(100, 130)))
        assert kept == [NOT_FOUND] * 21 + [OK] * 9
        _, errors = served.stop(signal.SIGKILL)
        assert "every user of this machine can read the token in" in errors
        assert errors.count("every user of this machine") == 1
    async with gateway(tmp_path / "kv", "--tenants", str(tenants)) as served:
        a = await served.dial(hello=Hello(token=b"alpha"))
        b = await served.dial(hello=Hello(token=b"beta"))
        assert await a.exist(*map(key_of, range(100, 130))) == kept
        assert await a.exist(*others) == [NOT_FOUND] * 10
        assert await b.read(*others) == list(others.values())
        _, errors = served.stop()
        assert "tenant a: 9 objects, 9440640 bytes, quota 10485760" in errors
        assert "tenant b: 10 objects, 2010880 bytes, no quota" in errors
        assert "alpha" not in errors
        assert "beta" not in errors


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, timeout=15, check=False)


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = run(*command(tmp_path, "--listen", endpoint, "--capacity", "64MiB"))
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith(f" ERROR cannot listen on {endpoint}: Address already in use")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_another_gateway_has(tmp_path: Path) -> None:
    with running(tmp_path):
        done = run(*command(tmp_path, "--listen", "tcp://127.0.0.1:0", "--capacity", "64MiB"))
        assert done.returncode == 3
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr


def test_bad_usage(tmp_path: Path) -> None:
    done = run(*command(tmp_path / "kv", "--capacity", "lots"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--capacity" in done.stderr
    assert not (tmp_path / "kv").exists()


async def test_json_log(tmp_path: Path) -> None:
    async with gateway(tmp_path, "--log-format", "json") as served:
        _, errors = served.stop()
    lines = [json.loads(line) for line in errors.splitlines()]
    (start,) = [line for line in lines if line["message"].startswith("serving")]
    assert start["objects"] == 0
    assert start["capacity_bytes"] == 64 * MIB
    assert len(start["boot_id"]) == 32
    assert start["endpoints"].startswith("tcp://127.0.0.1:")


async def test_a_full_disk_refuses_writes_and_serves_reads(tmp_path: Path) -> None:
    """The limit on the size of a file stands in for the device: EFBIG, as ENOSPC, is "no room"."""
    async with gateway(tmp_path, "--segment", "16MiB") as served:
        peer = await served.dial()
        assert await peer.write({key_of(1): content(MIB)}) == [OK]
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        statuses = await peer.write({key_of(n): content(MIB, seed=n) for n in range(2, 6)})
        assert set(statuses) == {ErrorCode.CAPACITY_EXHAUSTED}
        assert await peer.read(key_of(1), key_of(2)) == [content(MIB), None]
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert await peer.write({key_of(9): content(MIB, seed=9)}) == [OK]
        assert await peer.read(key_of(9)) == [content(MIB, seed=9)]
        status, errors = served.stop()
        assert status == 0
        assert "Traceback" not in errors


async def test_descriptors_come_back(tmp_path: Path) -> None:
    """Clients that come and go, politely or not, leave nothing open."""
    async with gateway(tmp_path) as served:
        keeper = await served.dial()
        await keeper.write({key_of(1): content(100_000)})
        folder = f"/proc/{served.process.pid}/fd"
        before = len(os.listdir(folder))  # noqa: PTH208
        for n in range(40):
            peer = await served.dial()
            await peer.ask(Read(namespace=NAMESPACE, keys=(key_of(1),) * 50, capacities=(100_000,) * 50))
            if n % 2:
                await peer.leave()
            await peer.transport.aclose()
        with anyio.fail_after(10):
            while len(os.listdir(folder)) > before:  # noqa: PTH208
                await keeper.exist(key_of(1))
        assert served.stop()[0] == 0


def memory_bytes(served: Gateway) -> int:
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


async def test_slow_readers_do_not_grow_memory(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        writer = await served.dial()
        objects = {key_of(n): content(MIB, seed=n) for n in range(24)}
        await writer.write(objects)
        await writer.read(*objects)
        before = memory_bytes(served)
        slow = [await served.dial() for _ in range(20)]
        for peer in slow:
            for _ in range(5):
                await peer.ask(Read(namespace=NAMESPACE, keys=tuple(objects), capacities=(MIB,) * 24))
        await writer.read(*objects)
        grown = memory_bytes(served) - before
        assert grown < 24 * MIB  # of 2,400 MiB that were asked for
        for peer in slow:
            await peer.transport.aclose()
        assert served.stop()[0] == 0


async def test_check_after_a_kill_and_with_damage(tmp_path: Path) -> None:
    data = tmp_path / "kv"
    check = [*command(data)[:3], "check", "--data", str(data)]
    async with gateway(data) as served:
        peer = await served.dial()
        assert await peer.write({key_of(n): content(50_000, seed=n) for n in range(8)}) == [OK] * 8
        done = run(*check)
        assert done.returncode == 3
        assert done.stderr.count("\n") == 1  # a gateway is running
        served.stop(signal.SIGKILL)
    done = run(*check)
    assert done.returncode == 0
    assert done.stdout.startswith("8 whole objects of 400000 bytes")
    (segment,) = [path for path in data.iterdir() if path.stat().st_size >= 400_000]
    with segment.open("r+b") as file:
        at = segment.read_bytes().index(content(50_000, seed=3)[:64])
        file.seek(at + 100)
        file.write(b"damage")
    done = run(*check)
    assert done.returncode == 1
    assert "1 problems, 0 repaired" in done.stdout
    assert run(*check, "--repair").returncode == 0
    async with gateway(data) as served:
        peer = await served.dial()
        stored = await peer.read(*map(key_of, range(8)))
        assert stored == [None if n == 3 else content(50_000, seed=n) for n in range(8)]


def fetch(port: int, path: str) -> tuple[int, str]:
    """Status and body."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head, _, body = sock.makefile().read().partition("\n\n")
    return int(head.split()[1]), body


def admin_port(served: Gateway) -> int:
    (port,) = re.findall(r"admin port: http://127\.0\.0\.1:(\d+)", served.log.read_text())
    return int(port)


async def test_health_and_metrics_of_a_process(tmp_path: Path) -> None:
    async with gateway(tmp_path, "--admin", "127.0.0.1:0", "--grace", "100") as served:
        port = admin_port(served)
        assert fetch(port, "/healthz") == (200, '{"status": "ready"}\n')
        peer = await served.dial()
        objects = {key_of(n): content(MIB, seed=n) for n in range(24)}
        await peer.write(objects)
        await peer.read(*objects, key_of(99))
        status, text = fetch(port, "/metrics")
        assert status == 200
        numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
        assert float(numbers["adp_gateway_objects"]) == 24
        assert float(numbers['adp_gateway_items_total{status="ok",verb="write"}']) == 24
        assert float(numbers['adp_gateway_misses_total{reason="not_found",verb="read"}']) == 1
        assert float(numbers["adp_gateway_sent_bytes_total"]) == 24 * MIB
        assert float(numbers["adp_gateway_capacity_bytes"]) == 64 * MIB
        await peer.ask(Read(namespace=NAMESPACE, keys=tuple(objects), capacities=(MIB,) * 24))
        served.process.send_signal(signal.SIGTERM)
        while not peer.notices:
            await peer.event()
        status, body = fetch(port, "/healthz")
        assert (status, json.loads(body)["status"]) == (503, "draining")
        await peer.transport.aclose()
        assert served.wait()[0] == 0
    with pytest.raises(ConnectionRefusedError):
        fetch(port, "/healthz")


async def test_b47_idle_and_busy_clients_and_an_open_scrape_do_not_hold_up_the_end(tmp_path: Path) -> None:
    """Exit status 0 within the grace time, the store closed cleanly, and nothing left for a check to find."""
    data = tmp_path / "kv"
    async with gateway(data, "--admin", "127.0.0.1:0", "--grace", "5") as served:
        scrapers = [socket.create_connection(("127.0.0.1", admin_port(served))) for _ in range(3)]
        idle = [await served.dial() for _ in range(5)]
        busy = [await served.dial() for _ in range(2)]
        for at, peer in enumerate(busy):
            objects = {key_of(100 * at + n): content(MIB, seed=n) for n in range(8)}
            assert await peer.write(objects) == [OK] * 8
            await peer.ask(Read(namespace=NAMESPACE, keys=tuple(objects), capacities=(MIB,) * 8))
        served.process.send_signal(signal.SIGTERM)
        for peer in (*idle, *busy):
            assert Goodbye(code=ErrorCode.SHUTTING_DOWN) in await peer.closed()
        status, errors = served.wait()
        assert status == 0
        assert "cutting" not in errors
        for sock in scrapers:
            sock.close()
    done = run(*command(data)[:3], "check", "--data", str(data))
    assert (done.returncode, done.stdout.split("; ")[1]) == (0, "0 problems, 0 repaired\n")


async def test_b54_a_gateway_listens_on_nothing_but_loopback_unless_told(tmp_path: Path) -> None:
    async with gateway(tmp_path / "kv", "--admin", "127.0.0.1:0") as served:
        sockets = {str(path.readlink()) for path in Path(f"/proc/{served.process.pid}/fd").iterdir()}  # noqa: ASYNC240
        for table, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
            rows = Path(f"/proc/{served.process.pid}/net/{table}").read_text().splitlines()[1:]  # noqa: ASYNC240
            own = [row.split() for row in rows if f"socket:[{row.split()[9]}]" in sockets]
            assert {fields[1].partition(":")[0] for fields in own} <= {loopback}
            assert len(own) == (2 if table == "tcp" else 0)
    done = run(*command(tmp_path / "kv", "--admin", "0.0.0.0:0"))
    assert done.returncode == 2
    assert "--insecure-admin" in done.stderr


def test_an_admin_port_in_use_leaves_nothing_behind(tmp_path: Path) -> None:
    data = tmp_path / "kv"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        admin = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run(*command(data, "--listen", f"unix://{tmp_path}/s", "--admin", admin))
    assert done.returncode == 1
    assert done.stderr.endswith(f"ERROR cannot listen on tcp://{admin}: Address already in use\n")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_status_3(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for data in (tmp_path / "file", tmp_path / "file" / "kv", Path("/proc/kv")):
        done = run(*command(data, "--listen", f"unix://{tmp_path}/s"))
        assert done.returncode == 3
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""


def test_a_full_device_at_the_start_is_one_line_and_no_obstacle_later(tmp_path: Path) -> None:
    """The limit on the size of a file stands in for the device."""
    words = command(tmp_path / "kv", "--listen", f"unix://{tmp_path}/s", "--capacity", "64MiB")
    done = run("sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *words)
    assert done.returncode == 3
    probed, said = done.stderr.splitlines()
    assert probed.endswith("direct I/O is not taken (File too large)")
    assert said.endswith("ERROR write superblock: File too large")
    with running(tmp_path / "kv") as served:
        assert served.stop()[0] == 0


def test_the_service_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in (str(tmp_path / "notify"), f"@adp-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(address.replace("@", "\0"))
            manager.settimeout(10)
            monkeypatch.setenv("NOTIFY_SOCKET", address)
            with running(tmp_path / "kv") as served:
                ready = manager.recv(4096).decode().splitlines()
                assert ready == ["READY=1", f"STATUS=serving {served.endpoints[0]}"]
                assert served.stop()[0] == 0
                assert manager.recv(4096).decode().splitlines()[0] == "STOPPING=1"
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    with running(tmp_path / "kv") as served:
        assert served.stop()[0] == 0


def test_a_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "gateway.toml").write_text(
        'data = "kv"\nlisten = "tcp://127.0.0.1:0"\ncapacity = "64MiB"\nmax_object = "8MiB"\n'
        'log_format = "json"\nadmin = "127.0.0.1:0"\n'
    )
    process = subprocess.Popen(
        [*command(tmp_path)[:4], "--config", str(tmp_path / "gateway.toml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready tcp://127.0.0.1:")
    process.terminate()
    _, errors = process.communicate(timeout=15)
    assert process.returncode == 0
    events = [json.loads(line).get("event") for line in errors.splitlines()]
    assert [event for event in events if event] == [
        "store_opened",
        "admin_port",
        "serving",
        "draining",
        "stopped",
    ]
    assert (tmp_path / "kv" / "superblock").exists()


async def test_stat_and_dump_beside_a_gateway(tmp_path: Path) -> None:
    data = tmp_path / "kv"
    async with gateway(data) as served:
        peer = await served.dial()
        objects = {key_of(n): content(50_000, seed=n) for n in range(8)}
        assert await peer.write(objects) == [OK] * 8
        program = command(data)[:3]
        told = json.loads(run(*program, "stat", "--data", str(data), "--json").stdout)
        assert (told["objects"], told["object_bytes"], told["is_in_use"]) == (8, 400_000, True)
        lines = run(*program, "dump", "--data", str(data), "--json").stdout.splitlines()
        assert {json.loads(line)["key"] for line in lines} == {key.hex() for key in objects}
        assert await peer.read(*objects) == list(objects.values())
        assert served.stop()[0] == 0
