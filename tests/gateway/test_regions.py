"""What a gateway takes for a region, how many, and that nothing of it is left."""

import fcntl
import mmap
import os
import resource
import socket
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from adp_client.protocol.constants import ErrorCode
from adp_gateway import regions
from adp_gateway.regions import MAX_REGIONS, RegionBudget, RegionRefused, Regions, is_within
from descriptors import descriptors, shared_mappings

pytestmark = pytest.mark.anyio

PAGE = 4096


@pytest.mark.parametrize(
    ("offset", "length", "is_right"),
    [
        (0, 0, True),
        (0, 4096, True),
        (4096, 0, True),
        (4095, 1, True),
        (4095, 2, False),
        (4097, 0, False),
        (0, 4097, False),
        ((1 << 64) - 1, 1, False),
        ((1 << 64) - 1, (1 << 32) - 1, False),
        ((1 << 64) - 4096, 4096, False),
        (1 << 63, 0, False),
        (1, (1 << 64) - 1, False),
    ],
)
def test_bounds(offset: int, length: int, is_right: bool) -> None:
    assert is_within(offset, length, 4096) is is_right


def memory_file(size: int = PAGE) -> int:
    fd = os.memfd_create("region", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def opened(house: Regions, number: int, fd: int | None, size: int = PAGE) -> ErrorCode:
    """Open a region as the session does; `fd` is the house's from here on."""
    house.received.append(fd)
    house.keep(number)
    try:
        house.open(number, number, size)
    except RegionRefused as exc:
        return exc.code
    return ErrorCode.OK


async def test_open_use_close() -> None:
    before = descriptors()
    house = Regions(RegionBudget())
    fd = memory_file(3 * PAGE)
    assert opened(house, 7, os.dup(fd), 2 * PAGE) is ErrorCode.OK
    region = house.get(7)
    assert region is not None
    os.pwrite(fd, b"content", PAGE)
    view = region.target(PAGE, 7)
    assert bytes(view) == b"content"
    assert os.pread(region.fd, 7, PAGE) == b"content"
    view.release()
    assert house.get(8) is None
    assert await house.close(8) is ErrorCode.STALE_EPOCH
    assert await house.close(7) is ErrorCode.OK
    assert house.get(7) is None
    assert await house.close(7) is ErrorCode.STALE_EPOCH
    assert opened(house, 7, os.dup(fd)) is ErrorCode.OK
    await house.leave()
    os.close(fd)
    assert descriptors() == before
    assert shared_mappings() == 0


async def test_close_waits_for_those_inside() -> None:
    house = Regions(RegionBudget())
    assert opened(house, 1, memory_file()) is ErrorCode.OK
    region = house.get(1)
    assert region is not None
    region.enter()
    closed: list[ErrorCode] = []

    async def close() -> None:
        closed.append(await house.close(1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        await anyio.wait_all_tasks_blocked()
        assert closed == []
        assert house.get(1) is None, "nobody new comes in"
        assert await house.close(1) is ErrorCode.STALE_EPOCH
        region.leave()
    assert closed == [ErrorCode.OK]


def read_only() -> int:
    fd = memory_file()
    path = f"/proc/self/fd/{fd}"
    again = os.open(path, os.O_RDONLY)
    os.close(fd)
    return again


def path_only() -> int:
    fd = memory_file()
    again = os.open(f"/proc/self/fd/{fd}", os.O_PATH)
    os.close(fd)
    return again


def sealed(seal: int) -> int:
    fd = memory_file()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
    return fd


def on_disk() -> int:
    with tempfile.TemporaryFile(dir=Path(__file__).parent) as file:
        file.truncate(PAGE)
        try:
            fcntl.fcntl(file.fileno(), fcntl.F_GET_SEALS)
        except OSError:
            return os.dup(file.fileno())
    pytest.skip("this checkout lies in memory")


def pipe_end() -> int:
    one, other = os.pipe()
    os.close(one)
    return other


def a_socket() -> int:
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        return os.dup(sock.fileno())


UNFIT = {
    "read only": read_only,
    "path only": path_only,
    "sealed": lambda: sealed(fcntl.F_SEAL_WRITE),
    "sealed for later": lambda: sealed(getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)),
    "on a disk": on_disk,
    "pipe": pipe_end,
    "socket": a_socket,
    "directory": lambda: os.open("/tmp", os.O_RDONLY),
    "zeros": lambda: os.open("/dev/zero", os.O_RDWR),
    "empty": lambda: memory_file(0),
    "too short": lambda: memory_file(PAGE - 1),
    "event": lambda: os.eventfd(0),
}


@pytest.mark.parametrize("make", UNFIT.values(), ids=UNFIT.keys())
async def test_what_is_no_region(make) -> None:
    before = descriptors()
    house = Regions(RegionBudget())
    assert opened(house, 1, make()) is ErrorCode.REFUSED
    assert house.get(1) is None
    assert descriptors() == before
    await house.leave()


@pytest.mark.parametrize("size", [0, PAGE + 1, 1 << 40, (1 << 40) + 1, 1 << 63, (1 << 64) - 1])
async def test_sizes_that_cannot_be(size: int) -> None:
    house = Regions(RegionBudget())
    assert opened(house, 1, memory_file(), size) is ErrorCode.REFUSED


async def test_numbers_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    budget = RegionBudget()
    house = Regions(budget)
    for number in range(MAX_REGIONS):
        assert opened(house, number, memory_file()) is ErrorCode.OK
    assert opened(house, 3, memory_file()) is ErrorCode.REFUSED, "it is there"
    assert opened(house, MAX_REGIONS, memory_file()) is ErrorCode.REFUSED, "too many"
    assert await house.close(5) is ErrorCode.OK
    assert opened(house, MAX_REGIONS, memory_file()) is ErrorCode.OK
    other = Regions(RegionBudget(max_regions=2))
    monkeypatch.setattr(regions, "MAX_REGION_BYTES", 2 * PAGE)
    assert opened(other, 1, memory_file()) is ErrorCode.OK
    assert opened(other, 2, memory_file(2 * PAGE), PAGE + 1) is ErrorCode.REFUSED, "too many bytes"
    assert opened(other, 3, memory_file()) is ErrorCode.OK
    assert opened(other, 4, memory_file()) is ErrorCode.REFUSED, "too many in the process"
    await house.leave()
    await other.leave()
    assert budget.regions == 0
    assert descriptors() == before


@pytest.mark.parametrize(("limit", "regions_"), [(1024, 256), (7, 1), (resource.RLIM_INFINITY, sys.maxsize)])
def test_the_budget_is_half_of_the_descriptors(monkeypatch, limit: int, regions_: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    assert RegionBudget().max_regions == regions_


async def test_a_descriptor_that_the_system_could_not_give() -> None:
    house = Regions(RegionBudget())
    assert opened(house, 1, None) is ErrorCode.GATEWAY_FAULT


async def test_no_address_space_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", no_room)
    before = descriptors()
    assert opened(Regions(RegionBudget()), 1, memory_file()) is ErrorCode.REFUSED
    assert descriptors() == before


async def test_what_was_received_and_never_used_is_closed() -> None:
    before = descriptors()
    house = Regions(RegionBudget())
    house.received.extend([memory_file(), None, memory_file()])
    house.keep(1)
    await house.leave()
    assert descriptors() == before
