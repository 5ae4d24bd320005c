"""READ of a batch of pages against a bare `sendfile` -> `recv_into` loop, and the client's processor time.

The client's own time is that of its process, all threads, less what the bare loop takes to receive the same
bytes in the same run: the kernel's copy is the same for every program, and grows with the page. What remains
is bookkeeping and the checksum, of which a row of its own says how much it is.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import xxhash

from adp_client import Client, ErrorCode
from adp_client.protocol.constants import NAMESPACE_BYTES
from bench.bare import bare_server
from bench.report import Row

BATCH_PAGES = 64
PAGE_SIZES = {"256k": 256 * 1024, "1m": 1024 * 1024}
WARM_UPS = 8
NAMESPACE = b"\x01" * NAMESPACE_BYTES


@attrs.frozen(kw_only=True)
class ReadRows:
    """What one transport gave."""

    throughput: list[Row]
    cpu: list[Row]


async def measure_reads(
    client: Client, *, transport: str, family: socket.AddressFamily, folder: Path, samples: int
) -> ReadRows:
    """Both page sizes over the transport that `client` uses; the reference uses the same kind of socket."""
    throughput, cpu = [], []
    for label, page_bytes in PAGE_SIZES.items():
        content = bytes(range(256)) * (page_bytes // 256)
        keys = [f"{label}/{page:028}".encode() for page in range(BATCH_PAGES)]
        pages = [page.to_bytes(8, "big") + content[8:] for page in range(BATCH_PAGES)]
        expect_ok((await client.write(NAMESPACE, keys, pages)).statuses, "WRITE")
        path = folder / f"{transport}-{label}"
        path.write_bytes(b"".join(pages))

        memory = memoryview(bytearray(BATCH_PAGES * page_bytes))
        buffers = [memory[page * page_bytes :][:page_bytes] for page in range(BATCH_PAGES)]
        ours: list[float] = []
        reference: list[float] = []
        beyond: list[float] = []
        checksums: list[float] = []
        with bare_server(path, page_bytes=page_bytes, count=BATCH_PAGES, family=family) as bare:
            for sample in range(samples + WARM_UPS):
                blank(memory)
                began, used = time.perf_counter(), time.process_time()
                result = await client.read(NAMESPACE, keys, buffers)
                took, used = time.perf_counter() - began, time.process_time() - used
                expect_ok(result.statuses, "READ")
                expect_pages(buffers, pages)

                blank(memory)
                began, bare_used = time.perf_counter(), time.process_time()
                bare.read(buffers)
                bare_took, bare_used = time.perf_counter() - began, time.process_time() - bare_used
                expect_pages(buffers, pages)
                if sample >= WARM_UPS:
                    ours.append(took)
                    reference.append(bare_took)
                    beyond.append(used - bare_used)
                    checksums.append(_checksum_seconds(buffers))
        name = f"socket_read_vs_sendfile/{transport}/{label}"
        throughput.append(
            Row.of_throughput(name, moved_bytes=BATCH_PAGES * page_bytes, ours=ours, reference=reference)
        )
        costs = {
            f"client_cpu_us_per_page/{transport}/{label}": beyond,
            f"client_checksum_us_per_page/{transport}/{label}": checksums,
        }
        cpu += [
            Row(
                name=name,
                ours=round(statistics.median(seconds) / BATCH_PAGES * 1e6, 1),
                reference=None,
                ratio=None,
                unit="us",
                samples=samples,
            )
            for name, seconds in costs.items()
        ]
    return ReadRows(throughput=throughput, cpu=cpu)


def _checksum_seconds(buffers: Sequence[memoryview]) -> float:
    """What hashing the pages costs alone: a part of what the client costs. From memory, not from the cache
    in which the client finds them, so it is an upper bound."""
    used = time.process_time()
    for buffer in buffers:
        xxhash.xxh3_64_intdigest(buffer)
    return time.process_time() - used


def blank(memory: memoryview) -> None:
    """Make sure that what is found afterwards was just received."""
    memory[:: len(memory) // BATCH_PAGES] = bytes(BATCH_PAGES)


def expect_pages(buffers: Sequence[memoryview | bytes], pages: Sequence[bytes]) -> None:
    if any(
        buffer[:8] != page[:8] or buffer[-8:] != page[-8:]
        for buffer, page in zip(buffers, pages, strict=True)
    ):
        raise RuntimeError("a page came back wrong")


def expect_ok(statuses: bytes, verb: str) -> None:
    if set(statuses) != {ErrorCode.OK}:
        raise RuntimeError(f"{verb} gave {sorted(set(statuses))}")
