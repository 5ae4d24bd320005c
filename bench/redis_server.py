"""A Redis server of our own, the reference of several rows."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis


@contextmanager
def redis_server(executable: str, folder: Path) -> Iterator[redis.Redis]:
    """A Redis server of our own on a Unix socket, without persistence."""
    path = folder / "redis.sock"
    command = [executable, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder) as process:
        try:
            deadline = time.monotonic() + 10
            client = redis.Redis(unix_socket_path=str(path))
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            yield client
            client.close()
        finally:
            process.terminate()
