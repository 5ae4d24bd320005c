"""READ of a batch of pages against a server that keeps values in memory: Redis, by one MGET.

redis-py parses with hiredis and returns each value as an object of its own. Moving it on to where an engine
wants it would be one more copy, which is left out: the reference is as good as it gets. Its pages are in the
memory of its server; ours come from files, through the page cache, and are checked against their checksums.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import redis

from adp_client import Client, SharedRegion
from bench.pairs import in_turns
from bench.reads import BATCH_PAGES, NAMESPACE, PAGE_SIZES, WARM_UPS, blank, expect_ok, expect_pages
from bench.redis_server import redis_server
from bench.report import Row


async def measure_values(client: Client, *, folder: Path, samples: int) -> list[Row]:
    """`shm_read_vs_redis/SIZE` and `socket_read_vs_redis/SIZE`, all over Unix sockets; none where there is no
    redis-server."""
    executable = shutil.which("redis-server")
    if executable is None:
        print("*_read_vs_redis: left out, there is no redis-server on PATH", flush=True)
        return []
    rows = []
    for label, page_bytes in PAGE_SIZES.items():
        content = bytes(range(256)) * (page_bytes // 256)
        keys = [f"{label}/values/{page:021}".encode() for page in range(BATCH_PAGES)]
        pages = [page.to_bytes(8, "big") + content[8:] for page in range(BATCH_PAGES)]
        expect_ok((await client.write(NAMESPACE, keys, pages)).statuses, "WRITE")
        # Over the socket, which leaves them in the page cache: what is written goes around it.
        buffers = [memoryview(bytearray(page_bytes)) for _ in keys]
        expect_ok((await client.read(NAMESPACE, keys, buffers)).statuses, "READ")
        with redis_server(executable, folder) as server:
            server.mset(dict(zip(keys, pages, strict=True)))
            for name, is_shared in (("shm_read_vs_redis", True), ("socket_read_vs_redis", False)):
                rows.append(
                    await _measure(
                        client,
                        server,
                        keys,
                        pages,
                        name=f"{name}/{label}",
                        is_shared=is_shared,
                        samples=samples,
                    )
                )
    return rows


async def _measure(
    client: Client,
    server: redis.Redis,
    keys: list[bytes],
    pages: list[bytes],
    *,
    name: str,
    is_shared: bool,
    samples: int,
) -> Row:
    page_bytes = len(pages[0])
    found: list[bytes] = []
    with SharedRegion.create(len(pages) * page_bytes) as region:
        memory = region.memory if is_shared else memoryview(bytearray(len(pages) * page_bytes))
        buffers = [memory[page * page_bytes :][:page_bytes] for page in range(len(pages))]
        slices = [region.slice(page * page_bytes, page_bytes) for page in range(len(pages))]

        async def ours() -> None:
            result = await client.read(NAMESPACE, keys, slices if is_shared else buffers)
            expect_ok(result.statuses, "READ")

        async def theirs() -> None:
            found[:] = cast(list[bytes], server.mget(keys))

        def check() -> None:
            if found:
                expect_pages(found, pages)
                found.clear()
            else:
                expect_pages(buffers, pages)
                blank(memory)

        pair = await in_turns(ours, theirs, check, samples=samples, warm_ups=WARM_UPS)
    return Row.of_throughput(
        name, moved_bytes=len(pages) * page_bytes, ours=pair.ours, reference=pair.reference
    )
