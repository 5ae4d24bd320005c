"""EXIST of 10,000 keys in one call, and the same questions to a Redis server through redis-py's pipeline."""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path

import redis

from adp_client import Client, ObjectKey
from bench.reads import NAMESPACE
from bench.redis_server import redis_server
from bench.report import Row

KEYS = 10_000
WARM_UPS = 5


async def measure_exists(client: Client, *, folder: Path, samples: int) -> list[Row]:
    """`exist_10k_ms`, and `exist_10k_vs_redis` where a redis-server is installed. All over Unix sockets."""
    keys = [
        ObjectKey(block_hash=hashlib.sha256(f"block {n}".encode()).digest(), group=0).to_bytes()
        for n in range(KEYS)
    ]
    # Every second key is there: neither side can answer without looking.
    stored = keys[::2]
    await client.write(NAMESPACE, stored, [b"x"] * len(stored))
    executable = shutil.which("redis-server")
    if executable is None:
        print("exist_10k_vs_redis: left out, there is no redis-server on PATH", flush=True)
        ours = [await time_ours(client, keys) for _ in range(samples + WARM_UPS)][WARM_UPS:]
        return [Row.of_times("exist_10k_ms", ours=ours)]

    ours, theirs = [], []
    with redis_server(executable, folder) as server:
        server.mset(dict.fromkeys(stored, b"x"))
        for sample in range(samples + WARM_UPS):
            mine, reference = await time_ours(client, keys), time_redis(server, keys)
            if sample >= WARM_UPS:
                ours.append(mine)
                theirs.append(reference)
    return [
        Row.of_times("exist_10k_ms", ours=ours),
        Row.of_times("exist_10k_vs_redis", ours=ours, reference=theirs),
    ]


async def time_ours(client: Client, keys: list[bytes]) -> float:
    """Seconds for one EXIST of all keys; the answer is checked."""
    began = time.perf_counter()
    result = await client.exist(NAMESPACE, keys)
    took = time.perf_counter() - began
    if result.count_ok != len(keys) // 2 or result.statuses[0] or not result.statuses[1]:
        raise RuntimeError(f"EXIST found {result.count_ok} keys")
    return took


def time_redis(server: redis.Redis, keys: list[bytes]) -> float:
    """Seconds for a pipeline of one EXISTS a key (one for all of them would only count); checked."""
    began = time.perf_counter()
    pipeline = server.pipeline(transaction=False)
    for key in keys:
        pipeline.exists(key)
    answers = pipeline.execute()
    took = time.perf_counter() - began
    if answers != [1, 0] * (len(keys) // 2):
        raise RuntimeError(f"EXISTS found {sum(answers)} keys")
    return took
