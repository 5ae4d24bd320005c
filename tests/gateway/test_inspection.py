"""`stat` and `dump`: what they say is what the store has, also beside a gateway and after a crash."""

import io
import json
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from adp_gateway.cli import main
from adp_gateway.cli.progress import Progress, duration, size
from adp_gateway.device.file import FileDevice
from adp_gateway.errors import NotAStore, StorageError, UnsupportedFormat
from adp_gateway.fsck import check
from adp_gateway.inspection import is_in_use, segment_ids, summarise, walk
from adp_gateway.store.base import PutItem
from adp_gateway.store.format import (
    RECORD_BYTES,
    SUPERBLOCK_NAME,
    UNIT_BYTES,
    Header,
    Kind,
    Record,
    encode_header,
    encode_records,
    encode_superblock,
)
from adp_gateway.store.segments import SegmentStore
from adp_gateway.tenants import Tenant, digest_of
from gateway.objects import NAMESPACE, config, key, payload, put, put_all

pytestmark = pytest.mark.anyio


def listed(directory: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> list[dict]:
    assert main(["dump", "--data", str(directory), "--json", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def image(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}


async def test_what_is_listed_is_what_is_there_beside_the_gateway_and_after(tmp_path, capsys) -> None:
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, {key(n): payload(n, 20_000 + n) for n in range(60)})
        await put_all(store, {key(n): payload(n + 500, 3000) for n in range(10)})  # overwritten
        await store.delete_many(NAMESPACE, [key(n) for n in range(50, 60)])
        stats = store.stats()
        assert stats.segments > 1
        during = image(tmp_path)
        live = listed(tmp_path, capsys=capsys)
        summary = summarise(tmp_path)
        assert image(tmp_path) == during, "it only reads"
        assert summary.is_in_use
        assert (summary.totals.objects, summary.totals.object_bytes) == (stats.objects, stats.object_bytes)
        expected = {
            (NAMESPACE, key(n)): store._catalog.index.get(NAMESPACE, key(n))
            for n in range(60)
            if store.exist(NAMESPACE, [key(n)]) == b"\0"
        }
    found = listed(tmp_path, capsys=capsys)
    assert found == live
    assert {
        (bytes.fromhex(line["namespace"]), bytes.fromhex(line["key"])): (
            line["segment"],
            line["offset"],
            line["length"],
            int(line["checksum"], 16),
            line["sequence"],
        )
        for line in found
    } == {subject: entry[:5] for subject, entry in expected.items()}
    after = summarise(tmp_path)
    assert not after.is_in_use
    assert not after.unreadable
    assert sum(segment.live_bytes for segment in after.segments) == after.totals.charged_bytes
    assert all(segment.live_bytes + segment.dead_bytes >= segment.device_bytes for segment in after.segments)
    assert {segment.damaged_records for segment in after.segments} == {0}


async def test_filters_by_the_beginning_of_namespace_and_key(tmp_path, capsys) -> None:
    other = bytes(reversed(NAMESPACE))
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, {key(n): payload(n, 100) for n in range(5)})
        item = PutItem(key=key(0), checksum=0x2D06800538D394C2, data=memoryview(b""))
        assert await store.put_many(other, [item]) == b"\0"
    assert len(listed(tmp_path, capsys=capsys)) == 6
    (only,) = listed(tmp_path, "--namespace", other.hex()[:6], capsys=capsys)
    assert (only["namespace"], only["length"], only["checksum"]) == (other.hex(), 0, "2d06800538d394c2")
    assert len(listed(tmp_path, "--key", key(0).hex(), capsys=capsys)) == 2
    assert len(listed(tmp_path, "--key", key(0).hex(), "--namespace", NAMESPACE.hex(), capsys=capsys)) == 1
    assert listed(tmp_path, "--key", "ff", capsys=capsys) == []
    with pytest.raises(SystemExit) as caught:
        main(["dump", "--data", str(tmp_path), "--namespace", "abc"])
    assert caught.value.code == 2
    assert "'abc' is no prefix" in capsys.readouterr().err


async def test_b48_replicas_that_cannot_share_are_seen_as_two_namespaces(tmp_path, capsys) -> None:
    """Another hash seed is another namespace: both fill the store, and `stat` shows it."""
    replicas = [bytes([n]) * 32 for n in (0xAA, 0xBB)]
    async with SegmentStore.open(config(tmp_path)) as store:
        for replica in replicas:
            item = PutItem(key=key(0), checksum=0x2D06800538D394C2, data=memoryview(b""))
            assert await store.put_many(replica, [item]) == b"\0"
    assert {name: part.objects for name, part in summarise(tmp_path).namespaces.items()} == dict.fromkeys(
        replicas, 1
    )
    assert main(["stat", "--data", str(tmp_path)]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        ["aa" * 12, "1"],
        ["bb" * 12, "1"],
    ]


async def test_lines_for_people(tmp_path, capsys) -> None:
    async with SegmentStore.open(config(tmp_path)) as store:
        await put(store, key(1), payload(1, 5000))
    assert main(["dump", "--data", str(tmp_path)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head == "# namespace key length checksum segment offset sequence"
    assert line.split()[:3] == [NAMESPACE.hex(), key(1).hex(), "5000"]
    assert main(["stat", "--data", str(tmp_path), "--segments"]) == 0
    text = capsys.readouterr().out
    assert "objects     1, 4.9 KiB" in text
    assert "format 1, not in use" in text
    assert NAMESPACE.hex()[:24] in text
    assert text.splitlines()[-1].split()[:2] == ["1", "1"]


async def test_stat_names_tenants_and_their_quotas(tmp_path, capsys) -> None:
    (tmp_path / "tenants.toml").write_text(
        f'[tenants.a]\ntoken_sha256 = "{digest_of(b"a").hex()}"\nquota = "1MiB"\n'
        f'[tenants.b]\ntoken_sha256 = "{digest_of(b"b").hex()}"\n'
    )
    tenant = Tenant(name="a", token_digest=b"")
    data = tmp_path / "kv"
    async with SegmentStore.open(config(data, accounts=(tenant.account,))) as store:
        item = PutItem(key=key(0), checksum=0x2D06800538D394C2, data=memoryview(b""))
        assert await store.put_many(tenant.stored(NAMESPACE), [item]) == b"\0"
        used_bytes = store.stats().accounts[0].used_bytes
    options = ["stat", "--data", str(data), "--tenants", str(tmp_path / "tenants.toml")]
    assert main([*options, "--json"]) == 0
    tenants = json.loads(capsys.readouterr().out)["tenants"]
    assert tenants["a"] == {
        "objects": 1,
        "object_bytes": 0,
        "charged_bytes": used_bytes,
        "quota_bytes": 1 << 20,
    }
    assert (tenants["b"]["objects"], tenants["b"]["quota_bytes"]) == (0, None)
    assert main(options) == 0
    assert "1.0 MiB" in capsys.readouterr().out


async def test_damage_and_tears_are_told_and_hide_nothing_else(tmp_path, capsys) -> None:
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, {key(n): payload(n, 1000) for n in range(4)})
    log = tmp_path / "seg-00000001.log"
    raw = bytearray(log.read_bytes())
    raw[2 * RECORD_BYTES + 50] ^= 1  # the commit of object 1
    log.write_bytes(raw + b"torn")
    summary = summarise(tmp_path)
    (segment,) = summary.segments
    assert (segment.objects, segment.damaged_records, segment.torn_bytes) == (3, 1, 4)
    assert {bytes.fromhex(line["key"]) for line in listed(tmp_path, capsys=capsys)} == {
        key(0),
        key(2),
        key(3),
    }
    assert main(["stat", "--data", str(tmp_path)]) == 0
    assert "damage      1 journal records, 4 bytes of torn journals" in capsys.readouterr().out


async def test_a_segment_that_cannot_be_read_is_said_and_the_others_are_told(tmp_path, capsys) -> None:
    async with SegmentStore.open(config(tmp_path)) as store:
        await put(store, key(1), payload(1, 1000))
    (tmp_path / "seg-00000007.data").write_bytes(b"half")
    for command in ("stat", "dump"):
        assert main([command, "--data", str(tmp_path), "--json"]) == 1
        said = capsys.readouterr()
        assert said.err == f"adp-gateway {command}: segment 7: No such file or directory\n"
        assert "1000" in said.out


async def test_a_segment_that_goes_meanwhile_is_no_trouble(tmp_path) -> None:
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, {key(n): payload(n, 20_000) for n in range(60)})
    first, *rest = segment_ids(tmp_path)
    assert rest
    found = walk(tmp_path)
    next(found)
    for path in tmp_path.glob(f"seg-{rest[0]:08d}.*"):
        path.unlink()
    kept = [line if isinstance(line, str) else line[0] for line in found]
    assert set(kept) == {first, *rest[1:]}


@pytest.mark.parametrize("command", ["stat", "dump", "check"])
def test_a_directory_that_is_no_store_is_one_line_and_status_3(command, tmp_path, capsys) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    for directory in (tmp_path, tmp_path / "nowhere", tmp_path / "thesis.txt"):
        assert main([command, "--data", str(directory)]) == 3
        said = capsys.readouterr()
        assert said.err.count("\n") == 1
        assert said.err.startswith(f"adp-gateway {command}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


async def test_a_newer_format_is_refused(tmp_path) -> None:
    async with SegmentStore.open(config(tmp_path)):
        pass
    start = struct.pack("<8sI", b"ADPSTORE", 99)
    (tmp_path / "superblock").write_bytes(start + struct.pack("<I", zlib.crc32(start)))
    with pytest.raises(UnsupportedFormat):
        summarise(tmp_path)
    (tmp_path / "superblock").unlink()
    with pytest.raises(NotAStore):
        segment_ids(tmp_path)
    with pytest.raises(StorageError):
        segment_ids(tmp_path / "superblock")


def test_who_has_it_is_asked_without_taking_it(tmp_path) -> None:
    assert is_in_use(tmp_path) is False
    device = FileDevice(tmp_path, max_command_bytes=4096)
    device.lock()
    assert is_in_use(tmp_path) is True
    device.close()
    assert is_in_use(tmp_path) is False


async def test_check_for_machines(tmp_path, capsys) -> None:
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, {key(n): payload(n, 5000) for n in range(3)})
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("copy"))
    with (copy / "seg-00000001.data").open("r+b") as file:
        file.write(b"damage")
    assert main(["check", "--data", str(copy), "--json"]) == 1
    problem, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert problem == {
        "problem": "corrupt",
        "segment": 1,
        "offset": 0,
        "namespace": NAMESPACE.hex(),
        "key": key(0).hex(),
    }
    assert summary == {"segments": 1, "objects": 2, "object_bytes": 10_000, "repaired": 0, "problems": 1}
    assert main(["check", "--data", str(copy), "--json", "--repair"]) == 0
    capsys.readouterr()
    assert main(["check", "--data", str(copy), "--progress"]) == 0


async def test_check_tells_how_far_it_is(tmp_path) -> None:
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, {key(n): payload(n, 20_000) for n in range(60)})
    told: list[tuple[int, int]] = []
    check(tmp_path, on_progress=lambda done, total: told.append((done, total)))
    assert len(told) == 60
    assert told == sorted(told)
    assert {total for _, total in told} == {sum(path.stat().st_size for path in tmp_path.glob("*.data"))}
    assert told[-1][0] <= told[-1][1]


def made_up(directory: Path, *, objects: int, namespaces: int = 1) -> None:
    """A store of one segment, written without a gateway."""
    directory.mkdir()
    (directory / SUPERBLOCK_NAME).write_bytes(encode_superblock())
    records = [
        Record(
            Kind.COMMIT,
            bytes([n % namespaces]) * 32,
            n.to_bytes(4, "big"),
            n * UNIT_BYTES,
            n % UNIT_BYTES,
            n,
            n + 1,
        )
        for n in range(objects)
    ]
    head = encode_header(Header(1, 1 << 30))
    (directory / "seg-00000001.log").write_bytes(head + encode_records(records, segment_id=1, slot=1))
    with (directory / "seg-00000001.data").open("wb") as data:
        data.truncate(objects * UNIT_BYTES)


def test_more_records_than_are_read_at_a_time_are_all_there_in_order(tmp_path, capsys) -> None:
    made_up(tmp_path / "kv", objects=10_000)
    lines = listed(tmp_path / "kv", capsys=capsys)
    assert [line["sequence"] for line in lines] == list(range(1, 10_001))


def test_a_summary_for_people_is_not_as_long_as_the_store(tmp_path, capsys) -> None:
    made_up(tmp_path / "kv", objects=100, namespaces=25)
    assert main(["stat", "--data", str(tmp_path / "kv")]) == 0
    assert capsys.readouterr().out.endswith("and 5 more: --json has all\n")
    assert main(["stat", "--data", str(tmp_path / "kv"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["namespaces"]) == 25


def test_whoever_reads_a_list_may_stop(tmp_path) -> None:
    made_up(tmp_path / "kv", objects=5000)
    words = [sys.executable, "-m", "adp_gateway", "dump", "--data", str(tmp_path / "kv")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"# namespace")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=15) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "lines"), [(io.StringIO, 3), (Terminal, 6)])
def test_progress_has_rate_and_what_is_left(stream, lines: int) -> None:
    now = [0.0]
    out = stream()
    progress = Progress("check", out, lambda: now[0])
    for _ in range(6):
        now[0] += 5
        progress(int(now[0]) << 20, 100 << 20)
    assert out.getvalue().count("check: ") == lines
    assert out.getvalue().rstrip("\n").endswith("check: 30.0 MiB of 100.0 MiB, 1.0 MiB/s, 1 min 10 s left")
    progress.finish()
    assert ("\r" in out.getvalue()) == out.isatty()


def test_sizes_and_durations_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
    assert [duration(n) for n in (0, 61, 3660, 3 * 86400)] == ["0 s", "1 min 1 s", "1 h 1 min", "3 days"]
