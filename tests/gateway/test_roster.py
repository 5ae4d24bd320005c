"""Whose a data directory is, and what each worker gets."""

import json
import socket
from pathlib import Path

import attrs
import pytest

from adp_client.protocol.workers import Place
from adp_client.transport import parse_endpoint
from adp_gateway.cli import main
from adp_gateway.config import GatewayConfig, StoreConfig
from adp_gateway.errors import NotAStore, StorageError
from adp_gateway.roster import (
    RECORD_NAME,
    WrongWorkers,
    check_shares,
    check_workers,
    make_roster,
    place_of,
    read_roster,
    store_directories,
    total_capacity_bytes,
    worker_config,
    worker_endpoint,
)
from adp_gateway.tenants import Tenant
from adp_gateway.workers import Assignment, Door, Socket

MIB = 1 << 20


def gateway_config(data: Path, **store: int) -> GatewayConfig:
    tenants = (
        Tenant(name="a", token_digest=bytes(32), quota_bytes=30 * MIB),
        Tenant(name="b", token_digest=b"\1" * 32),
    )
    accounts = tuple(tenant.account for tenant in tenants)
    return GatewayConfig(
        store=StoreConfig(directory=data, accounts=accounts, **store),
        tenants=tenants,
        listen=(parse_endpoint("tcp://127.0.0.1:7171"), parse_endpoint("unix:///run/kv.sock")),
    )


def test_a_directory_keeps_its_number_of_workers_and_its_id(tmp_path):
    assert read_roster(tmp_path) is None
    assert store_directories(tmp_path) == (tmp_path,)
    made = make_roster(tmp_path, 3)
    assert make_roster(tmp_path, 3) == read_roster(tmp_path) == made
    assert [path.name for path in store_directories(tmp_path)] == [f"worker-{at}-of-3" for at in range(3)]
    check_workers(tmp_path, 3)
    for other in (1, 2, 4):
        with pytest.raises(WrongWorkers, match="made with --workers 3"):
            check_workers(tmp_path, other)
    assert [path.name for path in tmp_path.iterdir()] == [RECORD_NAME]


def test_what_a_new_directory_may_hold(tmp_path):
    check_workers(tmp_path / "absent", 2)
    (tmp_path / "lock").touch()
    (tmp_path / f"{RECORD_NAME}.new").write_text('{"format"')  # somebody died while writing it
    (tmp_path / "lost+found").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "gateway.sock"))
        check_workers(tmp_path, 2)
    assert make_roster(tmp_path, 2).workers == 2


def test_somebody_elses_directory_is_refused(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(NotAStore, match=r"'thesis\.txt' is there"):
        check_workers(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_store_of_one_process_is_refused_to_several(tmp_path):
    (tmp_path / "superblock").touch()
    check_workers(tmp_path, 1)
    with pytest.raises(WrongWorkers, match="made with --workers 1"):
        check_workers(tmp_path, 2)


@pytest.mark.parametrize(
    "record",
    [
        "",
        "[]",
        '{"format": 1}',
        '{"format": 2, "workers": 2, "gateway_id": "00"}',
        json.dumps({"format": 1, "workers": 1, "gateway_id": "00" * 16}),
        json.dumps({"format": 1, "workers": 257, "gateway_id": "00" * 16}),
        json.dumps({"format": 1, "workers": True, "gateway_id": "00" * 16}),
        json.dumps({"format": 1, "workers": "2", "gateway_id": "00" * 16}),
        json.dumps({"format": 1, "workers": 2, "gateway_id": "00" * 15}),
        json.dumps({"format": 1, "workers": 2, "gateway_id": "no hex"}),
    ],
)
def test_a_record_that_cannot_be_is_an_error_and_stays(tmp_path, record):
    (tmp_path / RECORD_NAME).write_text(record)
    for look in (read_roster, store_directories, lambda data: check_workers(data, 2)):
        with pytest.raises(StorageError, match=f"{RECORD_NAME} is not a record of workers"):
            look(tmp_path)
    assert (tmp_path / RECORD_NAME).read_text() == record


def test_shares_are_even_and_never_more_than_the_whole(tmp_path):
    whole = gateway_config(tmp_path, capacity_bytes=100 * MIB)
    each = worker_config(whole, tmp_path / "worker", 1, 3)
    assert each.store.directory == tmp_path / "worker"
    assert each.store.capacity_bytes == 100 * MIB // 3
    assert [tenant.quota_bytes for tenant in each.tenants] == [10 * MIB, None]
    assert each.store.accounts == tuple(tenant.account for tenant in each.tenants)
    for name in ("incoming_bytes", "inflight_bytes", "request_bytes"):
        assert 3 * getattr(each, name) <= getattr(whole, name)
    assert attrs.evolve(whole, store=each.store, tenants=each.tenants).max_sessions == each.max_sessions


def test_a_capacity_that_cannot_be_shared_is_bad_usage(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--data", str(tmp_path), "--workers", "8", "--capacity", "1MiB"])
    assert caught.value.code == 2
    assert "--capacity must be between" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--workers", "0"], "--workers: must be between 1 and 256"),
        (["--workers", "257"], "--workers: must be between 1 and 256"),
        (["--workers", "2", "--listen", "tcp://127.0.0.1:65525"], "there is no port 65536 for worker 1"),
        (["--workers", "2", "--listen", "unix:///" + "k" * 106], "at most 107 bytes"),
        (["--worker", "{}"], "argument --worker: not what a parent tells a worker"),
        (["--worker", "no JSON"], "argument --worker: not what a parent tells a worker"),
    ],
)
def test_bad_usage(tmp_path, capsys, options, problem):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--data", str(tmp_path), *options])
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


def test_one_process_does_not_serve_what_several_made(tmp_path, capsys):
    make_roster(tmp_path, 2)
    assert main(["serve", "--data", str(tmp_path), "--listen", f"unix://{tmp_path}/s"]) == 3
    assert "made with --workers 2" in capsys.readouterr().err


def test_places_follow_the_endpoint():
    tcp, unix = parse_endpoint("tls://gateway:7171"), parse_endpoint("unix:///run/kv.sock")
    assert [str(worker_endpoint(tcp, at)) for at in (0, 2)] == ["tls://gateway:7181", "tls://gateway:7183"]
    assert [str(worker_endpoint(unix, at)) for at in (0, 2)] == [
        "unix:///run/kv.sock.0",
        "unix:///run/kv.sock.2",
    ]
    assert str(worker_endpoint(parse_endpoint("tcp://[::1]:0"), 5)) == "tcp://[::1]:0"
    assert place_of(worker_endpoint(tcp, 1)) == Place(port=7182)
    assert place_of(worker_endpoint(unix, 1)) == Place(name="kv.sock.1")


def test_the_default_capacity_does_not_shrink_with_what_is_stored(tmp_path):
    roster = make_roster(tmp_path, 2)
    empty = total_capacity_bytes(tmp_path)
    directory = roster.directory(tmp_path, 1)
    directory.mkdir()
    (directory / "segment").write_bytes(bytes(8 * MIB))
    assert abs(total_capacity_bytes(tmp_path) - empty) < empty // 10  # others write to this disk, too
    check_shares(gateway_config(tmp_path), 2)


def test_what_a_worker_is_told_survives_the_command_line(tmp_path):
    roster = make_roster(tmp_path, 2)
    told = Assignment(
        worker=1,
        roster=roster,
        capacity_bytes=10 * MIB,
        lifeline=9,
        doors=(
            Door(
                sockets=(Socket(descriptor=7, endpoint="tcp://127.0.0.1:7171"),),
                places=(Place(port=1), Place(port=2)),
            ),
            Door(sockets=(), places=(Place(name="ü.0"), Place(name="ü.1"))),
        ),
    )
    assert Assignment.from_text(told.to_text()) == told
    config = told.config(gateway_config(tmp_path))
    assert config.store.directory == tmp_path / "worker-1-of-2"
    assert config.store.capacity_bytes == 5 * MIB
