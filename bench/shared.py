"""READ into shared memory, against a bare loop of `preadv`.

The loop has as many threads as the gateway uses for one READ, reads pages of one file that is in the page

cache, into the same kind of memory, and neither frames nor checks anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from adp_client import Client, SharedRegion
from adp_gateway.sharing import THREADS
from bench.pairs import in_turns
from bench.reads import BATCH_PAGES, NAMESPACE, PAGE_SIZES, WARM_UPS, blank, expect_ok, expect_pages
from bench.report import Row

COMMAND_BYTES = 256 << 10  # what one command of the device takes, by default


async def measure_shared(client: Client, *, folder: Path, samples: int) -> list[Row]:
    """`shm_read_vs_preadv/SIZE` for both page sizes. `client` is connected over a Unix socket."""
    return [
        await _measure(client, page_bytes, label=label, folder=folder, samples=samples)
        for label, page_bytes in PAGE_SIZES.items()
    ]


async def _measure(client: Client, page_bytes: int, *, label: str, folder: Path, samples: int) -> Row:
    content = bytes(range(256)) * (page_bytes // 256)
    keys = [f"{label}/shared/{page:021}".encode() for page in range(BATCH_PAGES)]
    pages = [page.to_bytes(8, "big") + content[8:] for page in range(BATCH_PAGES)]
    expect_ok((await client.write(NAMESPACE, keys, pages)).statuses, "WRITE")
    # Over the socket, which leaves them in the page cache: what is written goes around it.
    once = [memoryview(bytearray(page_bytes)) for _ in keys]
    expect_ok((await client.read(NAMESPACE, keys, once)).statuses, "READ")
    path = folder / f"shared-{label}"
    path.write_bytes(b"".join(pages))
    with SharedRegion.create(BATCH_PAGES * page_bytes) as region, path.open("rb") as file:
        slices = [region.slice(page * page_bytes, page_bytes) for page in range(BATCH_PAGES)]
        memory = region.memory
        buffers = [memory[page * page_bytes :][:page_bytes] for page in range(BATCH_PAGES)]

        async def ours() -> None:
            expect_ok((await client.read(NAMESPACE, keys, slices)).statuses, "READ")

        def check() -> None:
            expect_pages(buffers, pages)
            blank(memory)

        with BareReader(file.fileno(), page_bytes, buffers) as bare:
            pair = await in_turns(ours, bare.read, check, samples=samples, warm_ups=WARM_UPS)
    return Row.of_throughput(
        f"shm_read_vs_preadv/{label}",
        moved_bytes=BATCH_PAGES * page_bytes,
        ours=pair.ours,
        reference=pair.reference,
    )


class BareReader:
    """`THREADS` threads of its own, each of which reads every so-manieth page by `preadv`."""

    def __init__(self, descriptor: int, page_bytes: int, buffers: Sequence[memoryview]) -> None:
        self._descriptor = descriptor
        self._page_bytes = page_bytes
        self._buffers = buffers
        self._pool = ThreadPoolExecutor(THREADS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    async def read(self) -> None:
        """Fill every buffer. Blocks: nothing else is to be done meanwhile."""
        for done in [self._pool.submit(self._read, first) for first in range(THREADS)]:
            done.result()

    def _read(self, first: int) -> None:
        for page in range(first, len(self._buffers), THREADS):
            buffer, begin = self._buffers[page], page * self._page_bytes
            for offset in range(0, self._page_bytes, COMMAND_BYTES):
                piece = buffer[offset : offset + COMMAND_BYTES]
                if os.preadv(self._descriptor, (piece,), begin + offset) != len(piece):
                    raise RuntimeError("the reference's file is too short")
