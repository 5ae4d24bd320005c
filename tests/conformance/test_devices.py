"""What `Device` promises, asked of every device: files, through the page cache and around it, and RAM."""

import ctypes
import errno
import fcntl
import mmap
import os
from contextlib import ExitStack, closing

import pytest

from adp_gateway.device.base import ALIGNMENT_BYTES as UNIT
from adp_gateway.device.base import MAX_EXTENTS, Device
from adp_gateway.device.direct import aligned_memory
from adp_gateway.device.file import FileDevice
from adp_gateway.device.memory import MemoryDevice
from adp_gateway.errors import DeviceFault, DeviceFull, MemoryGone, StoreLocked
from gateway.objects import payload

STEP = 16 * UNIT
LENGTHS = [1, 511, 512, UNIT - 1, UNIT, UNIT + 1, 5 * UNIT, STEP - 1, STEP]


def file_device(directory, io: str) -> FileDevice:
    """A locked device, or a skipped test where the file system takes no direct I/O."""
    device = FileDevice(directory, max_command_bytes=STEP, io=io)
    try:
        device.lock()
    except DeviceFault as fault:
        assert io == "direct"
        pytest.skip(str(fault))
    return device


@pytest.fixture(params=["buffered", "direct", "memory", "direct memory"])
def device(request, tmp_path):
    with ExitStack() as stack:
        if request.param.endswith("memory"):
            device = stack.enter_context(
                MemoryDevice(max_command_bytes=STEP, is_direct=request.param.startswith("direct"))
            )
            device.lock()
        else:
            device = file_device(tmp_path / "device", request.param)
        stack.enter_context(closing(device))
        assert device.is_direct == request.param.startswith("direct")
        yield device


@pytest.fixture
def extents(device: Device):
    with closing(device.create("extents", has_extents=True)) as file:
        file.allocate(64 * UNIT)
        yield file


def unaligned(data: bytes) -> memoryview:
    """The same bytes at an address that direct I/O takes nowhere."""
    memory = aligned_memory(len(data) + UNIT)[1 : 1 + len(data)]
    memory[:] = data
    return memory


def aligned(data: bytes) -> memoryview:
    memory = aligned_memory(len(data))
    memory[:] = data
    return memory


MEMORIES = pytest.mark.parametrize("memory", [memoryview, aligned, unaligned], ids=lambda kind: kind.__name__)


def read(file, length: int, offset: int, **how) -> bytes:
    """By a read command, into memory that is aligned and into memory that is not: both say the same."""
    found = set()
    for memory in (aligned, unaligned):
        target = memory(bytes(length))
        found.add(bytes(target[: file.read_into(target, offset, **how)]))
    (data,) = found
    return data


@MEMORIES
@pytest.mark.parametrize("length", LENGTHS)
def test_an_extent_comes_back_by_every_way(device, extents, length, memory):
    data = payload(length, length)
    extents.write_extents([memory(data)], 3 * UNIT)
    assert read(extents, length, 3 * UNIT) == data
    assert read(extents, length, 3 * UNIT, is_kept=True) == data
    assert os.pread(extents.fileno(), length, 3 * UNIT) == data, "as a socket gets it"
    assert read(extents, length, 3 * UNIT) == data, "now that it is in the page cache"
    with closing(device.open("extents", has_extents=True)) as again:
        assert read(again, length, 3 * UNIT) == data


@MEMORIES
@pytest.mark.parametrize(
    "lengths",
    [[UNIT, UNIT], [UNIT, 1], [1, UNIT], [100, 200, 300], [1] * 16, [UNIT + 1, 2 * UNIT, 5, 3 * UNIT]],
    ids=str,
)
def test_extents_of_one_command_start_at_whole_units(extents, lengths, memory):
    contents = [payload(at, length) for at, length in enumerate(lengths)]
    extents.write_extents([memory(data) for data in contents], UNIT)
    offset = UNIT
    for data in contents:
        assert read(extents, len(data), offset) == data
        offset += -(-len(data) // UNIT) * UNIT


def test_a_write_leaves_its_neighbours_alone(extents):
    before, behind = payload("before", UNIT), payload("behind", UNIT)
    extents.write_extents([memoryview(before)], 0)
    extents.write_extents([memoryview(behind)], 3 * UNIT)
    extents.write_extents([memoryview(payload("between", UNIT + 1))], UNIT)
    assert read(extents, UNIT, 0) == before
    assert read(extents, UNIT, 3 * UNIT) == behind


def test_both_ways_see_what_either_has_written(device, extents):
    """The kernel's rule on which everything else stands: a direct write drops what the page cache has, also
    what a neighbour's read-ahead brought there; a direct read writes back first what is newer there."""
    length = 64 * UNIT
    old = b"".join(payload(at, STEP) for at in range(4))
    for at in range(4):
        extents.write_extents([memoryview(old)[at * STEP :][:STEP]], at * STEP)
    assert os.pread(extents.fileno(), length, 0) == old  # the page cache has all of it
    for at in (1, 2):
        new = payload(("new", at), STEP)
        extents.write_extents([aligned(new)], at * STEP)
        assert os.pread(extents.fileno(), STEP, at * STEP) == new
        assert read(extents, STEP, at * STEP) == new
    dirty = payload("dirty", STEP)
    os.pwrite(extents.fileno(), dirty, 3 * STEP)
    assert read(extents, STEP, 3 * STEP) == dirty
    os.pwrite(extents.fileno(), dirty[:100], 7)
    assert read(extents, UNIT, 0) == old[:7] + dirty[:100] + old[107:UNIT]


def test_unwritten_room_reads_as_nothing_until_it_is_written(extents):
    """What a read-ahead finds in reserved room must not stay in the page cache when the room is filled."""
    assert os.pread(extents.fileno(), 8 * UNIT, 0) == bytes(8 * UNIT)
    data = payload("first", 2 * UNIT)
    extents.write_extents([aligned(data)], 2 * UNIT)
    assert os.pread(extents.fileno(), 8 * UNIT, 0) == bytes(2 * UNIT) + data + bytes(4 * UNIT)


def test_reads_end_where_the_file_does(extents):
    extents.write_extents([memoryview(payload(1, 4 * UNIT))], 0)
    extents.truncate(3 * UNIT + 100)
    assert read(extents, 4 * UNIT, 0) == payload(1, 4 * UNIT)[: 3 * UNIT + 100]
    assert read(extents, UNIT, 3 * UNIT) == payload(1, 4 * UNIT)[3 * UNIT :][:100]
    assert read(extents, UNIT, 4 * UNIT) == b""
    assert extents.size() == 3 * UNIT + 100


def test_what_is_cached_is_told_without_bringing_it_in(device, extents):
    data = payload(1, 4 * UNIT)
    extents.write_extents([aligned(data)], 0)
    os.fdatasync(extents.fileno())
    os.posix_fadvise(extents.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not extents.is_cached(0, 4 * UNIT)
    assert not extents.is_cached(0, 4 * UNIT), "asking changes nothing"
    target = aligned(bytes(4 * UNIT))
    assert extents.read_into(target, 0) == 4 * UNIT
    assert target == data
    assert not (device.is_direct and extents.is_cached(0, 4 * UNIT)), "nor does reading around it"


def test_what_breaks_the_rules_is_refused_before_anything_moves(device, extents):
    block = memoryview(bytes(STEP))
    with pytest.raises(ValueError, match="multiple"):
        extents.write_extents([block[:1]], 1)
    with pytest.raises(ValueError, match="above"):
        extents.write_extents([block, block[:1]], 0)
    with pytest.raises(ValueError, match="extents and"):
        extents.write_extents([block[:0]] * (MAX_EXTENTS + 1), 0)
    with pytest.raises(ValueError, match="file of extents"):
        extents.write(block, 0)
    with pytest.raises(ValueError, match="above"):
        extents.read_into(aligned_memory(STEP + 1), 0)
    with closing(device.create("log")) as log:
        with pytest.raises(ValueError, match="no file of extents"):
            log.write_extents([block], 0)
        with pytest.raises(ValueError, match="above"):
            log.write(memoryview(bytes(STEP + 1)), 0)
    assert read(extents, STEP, 0) == bytes(STEP)


def test_a_log_is_written_anywhere_in_any_length(device):
    with closing(device.create("log")) as log:
        log.write(memoryview(b"0123456789"), 0)
        log.write(memoryview(b"abc"), 3)
        assert log.size() == 10
        assert read(log, 10, 0) == b"012abc6789"
        log.truncate(5)
        assert read(log, 10, 0) == b"012ab"


def test_names(device):
    assert device.names() == []
    device.create("b", has_extents=True).close()
    device.create("a").close()
    device.sync_names()
    assert device.names() == ["a", "b"]
    with pytest.raises(DeviceFault):
        device.create("a")
    with pytest.raises(DeviceFault):
        device.open("c")
    device.remove("a")
    device.remove("a")
    assert device.names() == ["b"]
    assert device.strangers() == []


def test_what_is_removed_can_be_read_by_those_who_have_it_open(device, extents):
    data = payload(1, 2 * UNIT)
    extents.write_extents([memoryview(data)], 0)
    device.remove("extents")
    assert read(extents, 2 * UNIT, 0) == data
    extents.sync()


def test_closed_files_are_faults_and_closing_again_is_harmless(device, extents):
    extents.close()
    extents.close()
    assert extents.fileno() == -1
    for use in (
        lambda: extents.read_into(aligned_memory(UNIT), 0),
        lambda: extents.write_extents([memoryview(bytes(UNIT))], 0),
        lambda: extents.write_extents([memoryview(bytes(1)), memoryview(bytes(1))], 0),
    ):
        with pytest.raises(DeviceFault):
            use()


# Direct I/O on files: what the system is asked for


class Kernel:
    """Says no to what O_DIRECT does not take, also where the file system is more lenient, and takes notes."""

    def __init__(self, monkeypatch) -> None:
        self.commands: list[tuple[str, int, int]] = []
        self.is_short = False
        self._pwrite, self._preadv, self._pwritev = os.pwrite, os.preadv, os.pwritev
        for name in ("pwrite", "preadv", "pwritev"):
            monkeypatch.setattr(os, name, getattr(self, name))

    def _note(self, name: str, fd: int, views, offset: int) -> None:
        if not is_direct(fd):
            return
        for view in views:
            if offset % UNIT or len(view) % UNIT or address(view) % 512:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.commands.append((name, offset, sum(map(len, views))))

    def pwrite(self, fd, data, offset):
        self._note("write", fd, [data], offset)
        return self._pwrite(fd, data[: UNIT + 512] if self.is_short else data, offset)

    def pwritev(self, fd, views, offset):
        self._note("write", fd, views, offset)
        return self._pwritev(fd, views[:1] if self.is_short else views, offset)

    def preadv(self, fd, views, offset):
        self._note("read", fd, views, offset)
        return self._preadv(fd, views, offset)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def address(view) -> int:
    """Memory that cannot be written to counts as unaligned."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if not memoryview(view).readonly else 1


@pytest.fixture
def direct_file(tmp_path):
    with (
        closing(file_device(tmp_path / "device", "direct")) as device,
        closing(device.create("extents", has_extents=True)) as file,
    ):
        file.allocate(64 * UNIT)
        yield file


def forget(file) -> None:
    """Have the page cache forget the file."""
    os.fdatasync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_aligned_memory_is_used_as_it_is_in_one_command(direct_file, monkeypatch):
    kernel = Kernel(monkeypatch)
    direct_file.write_extents([aligned(payload(1, 3 * UNIT)), aligned(payload(2, UNIT + 9))], UNIT)
    assert kernel.commands == [("write", UNIT, 5 * UNIT)]
    forget(direct_file)
    kernel.commands.clear()
    target = aligned(bytes(3 * UNIT))
    assert direct_file.read_into(target, UNIT) == 3 * UNIT
    assert kernel.commands == [("read", UNIT, 3 * UNIT)]
    assert target == payload(1, 3 * UNIT)


def test_other_memory_costs_a_copy_and_no_more_commands(direct_file, monkeypatch):
    kernel = Kernel(monkeypatch)
    direct_file.write_extents([unaligned(payload(1, 3 * UNIT)), aligned(payload(2, UNIT))], UNIT)
    direct_file.write_extents([memoryview(payload(3, 7)), memoryview(payload(4, 7))], 5 * UNIT)
    assert kernel.commands == [("write", UNIT, 4 * UNIT), ("write", 5 * UNIT, 2 * UNIT)]


def test_what_is_in_the_page_cache_is_taken_from_there(direct_file, monkeypatch):
    data = payload(1, 4 * UNIT)
    direct_file.write_extents([aligned(data)], 0)
    assert not direct_file.is_cached(0, len(data))
    os.pread(direct_file.fileno(), len(data), 0)
    if not direct_file.is_cached(0, len(data)):
        pytest.skip("this system does not say what is in the page cache")
    kernel = Kernel(monkeypatch)
    target = aligned(bytes(4 * UNIT))
    direct_file.read_into(target, 0)
    assert target == data
    assert kernel.commands == []


def test_short_direct_writes_are_finished(direct_file, monkeypatch):
    kernel = Kernel(monkeypatch)
    kernel.is_short = True
    data = [payload(1, 3 * UNIT), payload(2, 2 * UNIT + 5)]
    direct_file.write_extents([aligned(each) for each in data], 0)
    assert os.pread(direct_file.fileno(), 3 * UNIT, 0) == data[0]
    assert os.pread(direct_file.fileno(), 2 * UNIT + 5, 3 * UNIT) == data[1]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.EIO, DeviceFault),
        (errno.ENOSPC, DeviceFull),
        (errno.EDQUOT, DeviceFull),
        (errno.EINVAL, DeviceFault),
    ],
)
def test_errors_are_typed(direct_file, monkeypatch, code, expected):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", refuse)
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(expected):
        direct_file.write_extents([aligned(bytes(UNIT))], 0)
    if code != errno.EINVAL:
        forget(direct_file)
        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(expected):
            direct_file.read_into(aligned_memory(UNIT), 0)


def test_a_write_that_moves_nothing_is_a_fault(direct_file, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    monkeypatch.setattr(os, "pwrite", lambda *_: 512)
    with pytest.raises(DeviceFault, match="takes no more"):
        direct_file.write_extents([aligned(bytes(UNIT))], 0)


def test_a_mapping_that_was_cut_off_is_no_fault_of_the_device(direct_file):
    direct_file.write_extents([aligned(payload(1, 4 * UNIT))], 0)
    forget(direct_file)
    fd = os.memfd_create("region")
    try:
        os.ftruncate(fd, 4 * UNIT)
        with mmap.mmap(fd, 4 * UNIT) as mapping, memoryview(mapping) as memory:
            os.ftruncate(fd, 2 * UNIT)
            with pytest.raises(MemoryGone):
                direct_file.read_into(memory, 0)
    finally:
        os.close(fd)


# Which way it is


def refusing_direct(monkeypatch, code: int) -> None:
    """A file system that takes no O_DIRECT."""
    real = os.open

    def open_buffered(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_buffered)


def test_auto_says_once_what_it_found(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    refusing_direct(monkeypatch, errno.EINVAL)
    device = FileDevice(tmp_path, max_command_bytes=STEP)
    device.lock()
    assert not device.is_direct
    assert caplog.messages == [f"buffered I/O in {tmp_path}: direct I/O is not taken (Invalid argument)"]
    assert (tmp_path / "lock").stat().st_size == 0
    assert device.names() == []
    device.close()


def test_buffered_does_not_even_try(tmp_path, caplog):
    caplog.set_level("INFO")
    device = file_device(tmp_path, "buffered")
    assert not device.is_direct
    assert caplog.messages == [f"buffered I/O in {tmp_path}, as configured"]
    device.close()


def test_direct_that_is_not_taken_is_a_fault_and_the_place_is_free_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        refusing_direct(patch, errno.EINVAL)
        with pytest.raises(DeviceFault, match=r"direct I/O is not taken in .*: Invalid argument"):
            FileDevice(tmp_path, max_command_bytes=STEP, io="direct").lock()
    device = FileDevice(tmp_path, max_command_bytes=STEP)
    device.lock()
    with pytest.raises(StoreLocked):
        FileDevice(tmp_path, max_command_bytes=STEP).lock()
    device.close()


def test_a_full_disk_says_nothing_about_direct_io(tmp_path, monkeypatch):
    file_device(tmp_path, "direct").close()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    device = file_device(tmp_path, "auto")
    assert device.is_direct
    device.close()


def test_a_device_that_gives_something_else_back_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda *_: UNIT)
    device = file_device(tmp_path, "auto")
    assert not device.is_direct
    device.close()
