"""Where the numbers were measured. They mean little without it."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from adp_gateway.device.direct import why_not_direct


def describe(data: Path) -> dict[str, object]:
    """The machine, in the keys of latest.json's `machine`; `data` is where the gateway keeps its files."""
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _after("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _after("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": _file_system(data),
        "direct_io": _direct_io(data),
        "adp-kv": version("adp-kv"),
    }


def _direct_io(folder: Path) -> str:
    """What a gateway whose data is in the folder would say of it."""
    probe = folder / "probe"
    probe.touch()
    reason = why_not_direct(probe)
    probe.unlink()
    return "taken" if reason is None else f"not taken: {reason}"


def _after(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _file_system(path: Path) -> str:
    """The type of the file system below `path`: the longest mount point that is a prefix of it wins."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, file_system, *_ = line.split()
        if path.resolve().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, file_system
    return kind
