"""A client used where it does not belong: another loop, a loop that has ended, threads, a fork, a spawn.

In a program of its own, because forking this one would take the other tests' threads along.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from .process import running

PROGRAM = '''
import asyncio, copy, multiprocessing, os, pickle, sys, threading
import anyio, trio
from adp_client import Client, ClientConfig

CONFIG = ClientConfig(endpoint=sys.argv[1])
NAMESPACE = bytes(32)


def told(call):
    """What a use in the wrong place raises, in one line; it never hangs."""
    try:
        call()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return "nothing"


def run(client, backend):
    async def use():
        with anyio.fail_after(10):
            await client.exist(NAMESPACE, [b"k"])

    anyio.run(use, backend=backend)


def in_threads(client, count):
    said = []
    threads = [
        threading.Thread(target=lambda name=name: said.append(told(lambda: run(client, name))))
        for name in ("asyncio", "trio", "asyncio", "trio")[:count]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


def in_a_fork(client):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            # The loop of the parent counts as running here; one of its own needs a thread of its own.
            os.write(writer, in_threads(client, 1)[0].encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    return os.read(reader, 1000).decode()


def in_a_spawn(client):
    context = multiprocessing.get_context("spawn")
    return told(lambda: context.Process(target=run, args=(client, "asyncio")).start())


async def main():
    async with Client(CONFIG) as client:
        await client.write(NAMESPACE, [b"k"], [b"v"])
        for said in in_threads(client, 4):
            print("thread", said)
        print("fork", in_a_fork(client))
        print("spawn", in_a_spawn(client))
        print("copy", told(lambda: copy.copy(client)))
        print("parent", (await client.exist(NAMESPACE, [b"k"])).is_all_ok, client.stats().connections_lost)
    print("closed", told(lambda: pickle.dumps(client)))


async def leave_open():
    client = Client(CONFIG)
    await client.__aenter__()
    await client.ping()
    return client


if __name__ == "__main__":
    anyio.run(main, backend=sys.argv[2])
    if sys.argv[2] == "asyncio":
        left = asyncio.run(leave_open())
        print("ended", told(lambda: run(left, "asyncio")))
'''


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_b35_a_client_used_where_it_does_not_belong_says_the_rule(tmp_path: Path, backend: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with running(tmp_path / "data", listen=(f"unix://{tmp_path}/s",)) as served:
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", str(program), served.endpoints[0], backend],
            capture_output=True,
            text=True,
            timeout=50,
        )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    said = dict(lines)
    rule = "RuntimeError: this Client belongs to the thread and process that entered it"
    assert [text.startswith(rule) for word, text in lines if word == "thread"] == [True] * 4
    assert said["fork"].startswith(rule)
    for word in ("spawn", "copy", "closed"):
        assert said[word] == "TypeError: a Client cannot be sent to another process: make one there"
    assert said["parent"] == "True 0"
    if backend == "asyncio":
        assert said["ended"] == "LinkClosed: the client is closed"
