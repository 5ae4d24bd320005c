"""What a process holds open: for tests that nothing is left behind."""

import contextlib
from pathlib import Path


def descriptors(pid: int | str = "self") -> int:
    """How many descriptors a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def of_clients(pid: int) -> int:
    """How many of a gateway's descriptors are connections or memory of its clients: not its own files."""
    count = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += path.readlink().as_posix().startswith(("socket:", "/memfd:"))
    return count


def shared_mappings(pid: int | str = "self") -> int:
    """How many regions it has mapped, by anybody's name for them."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:")
