"""Which workers a data directory belongs to, and what each of them gets of what the gateway has.

    DATA/workers.json         {"format": 1, "workers": 4, "gateway_id": "..."}, written before anything else
    DATA/lock                 whoever holds it is the gateway
    DATA/worker-2-of-4/       the store of worker 2

Which worker keeps an object depends on how many there are, so a directory keeps the number that it was made
with. The gateway id says to clients that the same objects are still at the same workers.
"""

import json
import os
from pathlib import Path
from typing import Any

import attrs

from adp_client.protocol.constants import GATEWAY_ID_BYTES, MAX_WORKERS
from adp_client.protocol.workers import Place
from adp_client.transport.endpoints import Endpoint, UnixEndpoint, parse_endpoint

from .config import GatewayConfig, default_capacity_bytes
from .device.file import LOCK_NAME, LOST_AND_FOUND
from .errors import NotAStore, StorageError
from .store.format import SUPERBLOCK_NAME

RECORD_NAME = "workers.json"
PORT_STEP = 10  # from a gateway's port to those of its workers
ADMIN_PORT_STEP = 300  # the same for the admin port, which is beside the other: clear of 256 workers
_FORMAT = 1


class WrongWorkers(StorageError):
    """The directory was made for another number of workers. It was not touched."""


@attrs.frozen(kw_only=True)
class Roster:
    """How many workers there are, and the id that stands for what each of them keeps."""

    workers: int
    gateway_id: bytes

    def directory(self, data: Path, worker: int) -> Path:
        """Where the store of a worker is."""
        return data / f"worker-{worker}-of-{self.workers}"


def read_roster(data: Path) -> Roster | None:
    """Whose `data` is; None if it belongs to a gateway of one process, or to nobody yet.

    Raises StorageError if there is a record that cannot be read.
    """
    path = data / RECORD_NAME
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise StorageError(f"cannot read {path}: {exc.strerror}") from exc
    try:
        return _roster_of(json.loads(raw))
    except (ValueError, TypeError, KeyError) as exc:
        raise StorageError(f"{path} is not a record of workers: {exc}") from None


def _roster_of(record: Any) -> Roster:
    if record["format"] != _FORMAT:
        raise ValueError(f"format {record['format']!r}; this version reads {_FORMAT}")
    workers, gateway_id = record["workers"], bytes.fromhex(record["gateway_id"])
    if type(workers) is not int or not 2 <= workers <= MAX_WORKERS or len(gateway_id) != GATEWAY_ID_BYTES:
        raise ValueError("its values are not such as this program writes")
    return Roster(workers=workers, gateway_id=gateway_id)


def check_workers(data: Path, workers: int) -> None:
    """Raise WrongWorkers if `data` was made for another number of workers than this."""
    roster = read_roster(data)
    made_for = 1 if roster is None else roster.workers
    if roster is None and (workers == 1 or not data.is_dir() or not _holds_a_store(data)):
        return
    if made_for != workers:
        raise WrongWorkers(
            f"{data} was made with --workers {made_for}, and which worker keeps an object depends on that: "
            f"say --workers {made_for}, or name an empty directory"
        )


def _holds_a_store(data: Path) -> bool:
    """Of a gateway of one process. Raises NotAStore for somebody else's files, which stay as they are."""
    harmless = {LOCK_NAME, LOST_AND_FOUND, f"{RECORD_NAME}.new"}
    try:
        found = [entry for entry in data.iterdir() if entry.name not in harmless and not entry.is_socket()]
    except OSError as exc:
        raise StorageError(f"cannot list {data}: {exc.strerror}") from exc
    if any(entry.name == SUPERBLOCK_NAME for entry in found):
        return True
    if found:
        name = min(entry.name for entry in found)
        raise NotAStore(f"{data} holds no store, but is not empty ({name!r} is there): name an empty one")
    return False


def make_roster(data: Path, workers: int) -> Roster:
    """The record of a directory that is locked and was checked; written if it is not there yet.

    Raises OSError. Whenever this dies, there is no record or a whole one.
    """
    roster = read_roster(data)
    if roster is not None:
        return roster
    roster = Roster(workers=workers, gateway_id=os.urandom(GATEWAY_ID_BYTES))
    record = {"format": _FORMAT, "workers": workers, "gateway_id": roster.gateway_id.hex()}
    draft = data / f"{RECORD_NAME}.new"
    with draft.open("w") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(data / RECORD_NAME)
    directory = os.open(data, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return roster


def store_directories(data: Path) -> tuple[Path, ...]:
    """The stores of a data directory: its own, or one for each worker. Raises StorageError."""
    roster = read_roster(data)
    if roster is None:
        return (data,)
    return tuple(roster.directory(data, worker) for worker in range(roster.workers))


def total_capacity_bytes(data: Path) -> int:
    """How much all workers together may take where nobody has said it: 80% of what there is for them."""
    used_bytes = sum(
        entry.stat().st_blocks * 512
        for directory in store_directories(data)
        if directory.is_dir()
        for entry in directory.iterdir()
    )
    room = os.statvfs(data)
    return default_capacity_bytes(free_bytes=room.f_bavail * room.f_frsize, used_bytes=used_bytes)


def worker_config(config: GatewayConfig, directory: Path, worker: int, workers: int) -> GatewayConfig:
    """What one of `workers` is told: its share of what is counted for the gateway as a whole.

    Keys are hashes, so the shares are even. Raises ValueError if a share is too small.
    """
    tenants = tuple(
        tenant
        if tenant.quota_bytes is None
        else attrs.evolve(tenant, quota_bytes=max(1, tenant.quota_bytes // workers))
        for tenant in config.tenants
    )
    capacity_bytes = config.store.capacity_bytes
    return attrs.evolve(
        config,
        store=attrs.evolve(
            config.store,
            directory=directory,
            capacity_bytes=None if capacity_bytes is None else capacity_bytes // workers,
            accounts=tuple(tenant.account for tenant in tenants),
        ),
        tenants=tenants,
        admin=None if config.admin is None else worker_endpoint(config.admin, worker, ADMIN_PORT_STEP),
        incoming_bytes=max(1, config.incoming_bytes // workers),
        inflight_bytes=max(1, config.inflight_bytes // workers),
        request_bytes=max(1, config.request_bytes // workers),
    )


def check_shares(config: GatewayConfig, workers: int) -> None:
    """Raise ValueError if that many workers cannot share what there is, or have no place to listen."""
    for worker in range(workers):
        worker_config(config, config.store.directory, worker, workers)
        for endpoint in config.listen:
            worker_endpoint(endpoint, worker)


def worker_endpoint(endpoint: Endpoint, worker: int, step: int = PORT_STEP) -> Endpoint:
    """Where one worker listens: ports from `step` further on, the path with its number. Port 0 stays 0.

    Raises ValueError if there is no such port, or the path is too long.
    """
    if isinstance(endpoint, UnixEndpoint):
        return parse_endpoint(f"unix://{endpoint.path}.{worker}")
    port = endpoint.port + step + worker if endpoint.port else 0
    if port > 65535:
        raise ValueError(f"{endpoint}: there is no port {port} for worker {worker}")
    return attrs.evolve(endpoint, port=port)


def place_of(endpoint: Endpoint) -> Place:
    """What clients are told of a worker that listens there."""
    if isinstance(endpoint, UnixEndpoint):
        return Place(name=Path(endpoint.path).name)
    return Place(port=endpoint.port)
