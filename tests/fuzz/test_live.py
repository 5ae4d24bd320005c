"""The live fuzzer finds nothing at the real gateway, and what is planted in wrong ones."""

import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

import adp_gateway.server
import adp_gateway.session
from adp_client.protocol.codec import decode_body, encode_body
from adp_client.protocol.constants import HEADER_BYTES, Feature, Flag, Opcode
from adp_client.protocol.frames import decode_header, encode_header
from adp_client.protocol.messages import ExistReply, Limits, StatusReply, Welcome
from adp_client.transport import UnixEndpoint
from adp_gateway.config import GatewayConfig, StoreConfig
from adp_gateway.outbox import Outbox
from adp_gateway.server import Server
from adp_gateway.session import Session
from adp_gateway.store.base import Status
from adp_gateway.store.memory import MemoryStore
from certificates import Authority
from fuzz.live.cases import BadCaseFile, CaseFile, load, moved, save
from fuzz.live.command import Run
from fuzz.live.drive import Gateway
from fuzz.live.generate import generate
from policy.checkout import ROOT
from sockets.process import running

WELCOME = Welcome(boot_id=bytes(16), features=Feature.FRAGMENTS | Feature.LEASES, limits=Limits())


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Without the debugging that other tests have: this is about many sequences in a short time."""
    return request.param


@asynccontextmanager
async def serving(folder: Path, store: MemoryStore, **options: Any) -> AsyncIterator[UnixEndpoint]:
    endpoint = UnixEndpoint(path=str(folder / "gateway.sock"))
    config = GatewayConfig(store=StoreConfig(directory=folder), listen=(endpoint,), **options)
    async with anyio.create_task_group() as tasks:
        await tasks.start(Server(config, store).serve)
        try:
            yield endpoint
        finally:
            tasks.cancel_scope.cancel()


async def fuzzed(endpoint: UnixEndpoint, **options: Any) -> Run:
    settings: dict[str, Any] = {"seed": 1, "seconds": 60.0, "watches_signals": False}
    token = options.pop("token", b"")
    deadline = options.pop("deadline", 5.0)
    gateway = Gateway(endpoint=endpoint, deadline=deadline, token=token)
    run = Run(gateway=gateway, **(settings | options))
    await run.run()
    return run


@pytest.mark.anyio
@pytest.mark.timeout(60)
async def test_nothing_is_found_at_the_real_gateway(tmp_path: Path) -> None:
    store = MemoryStore()
    async with serving(tmp_path, store, token=b"secret") as endpoint:
        run = await fuzzed(endpoint, most_sequences=100, token=b"secret", connections=9)
        assert run.finding is None
        assert run.status == 0
        assert run.tally.sequences == 100
        assert run.tally.violations > 20
        assert len(run.tally.errors) > 5
        assert run.tally.other_codes == 0
        assert {"OK", "NOT_FOUND", "CORRUPT", "TOO_LARGE"} <= run.tally.statuses.keys()


@pytest.mark.anyio
async def test_a_gateway_that_goes_away_is_no_finding(tmp_path: Path) -> None:
    endpoint = UnixEndpoint(path=str(tmp_path / "gateway.sock"))
    config = GatewayConfig(store=StoreConfig(directory=tmp_path), listen=(endpoint,), grace_seconds=5.0)
    server = Server(config, store := TellsOfExist())
    gateway = Gateway(endpoint=endpoint, deadline=5.0)
    run = Run(gateway=gateway, seed=1, seconds=60.0, replayed=(), watches_signals=False)
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        tasks.start_soon(drain_when, store.told, server)
        assert await run.run() == 2
    assert run.finding is None


class TellsOfExist(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.told = anyio.Event()

    def exist(self, namespace, keys):
        self.told.set()
        return super().exist(namespace, keys)


async def drain_when(told: anyio.Event, server: Server) -> None:
    await told.wait()
    server.drain()


def test_the_command_ends_cleanly_when_it_is_interrupted(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with running(tmp_path / "kv", "--token-file", str(token)) as gateway:
        process = fuzz_command(gateway.endpoints[0], "--token-file", str(token), "--seed", "3")
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=15)
    assert first.startswith(f"fuzzing {gateway.endpoints[0]} (adp-gateway/")
    assert first.endswith("seed 3\n")
    assert rest.startswith("stopping\n")
    assert rest.endswith("nothing found\n")
    assert (process.returncode, errors) == (0, "")


def test_a_gateway_that_speaks_tls_is_fuzzed_with_the_certificates_that_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ours, theirs = authority.issue("client.test"), authority.issue("127.0.0.1")
    serves = ("--tls-certificate", theirs.certificate, "--tls-key", theirs.key)
    demands = ("--tls-client-ca", authority.file, "--insecure-no-token")
    with running(tmp_path / "kv", *serves, *demands, listen=("tls://127.0.0.1:0",)) as gateway:
        shows = ("--tls-certificate", ours.certificate, "--tls-key", ours.key)
        for more, status, words in (
            (("--tls-ca", authority.file, *shows), 0, "nothing found"),
            (shows, 2, "cannot fuzz"),
            (("--tls-ca", authority.file), 2, "cannot fuzz"),
        ):
            process = fuzz_command(gateway.endpoints[0], "--seed", "3", "--seconds", "2", *more)
            said, errors = process.communicate(timeout=40)
            assert words in said, errors
            assert process.returncode == status, said


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("unix:///nowhere",), "cannot fuzz unix:///nowhere: cannot connect"),
        (("nowhere",), "is none of tcp://HOST:PORT"),
        (("unix:///x", "frames"), "name no TARGET beside it"),
        (("unix:///x", "--connections", "2"), "--connections must be at least 3"),
        (("unix:///x", "--deadline", "0"), "must be above 0"),
        (("unix:///x", "--replay", "/nowhere.json"), "No such file"),
        (("unix:///x", "--token-file", "/nowhere"), "No such file"),
        (("tcp://127.0.0.1:1", "--tls-ca", "ca.pem"), "is for endpoints tls://HOST:PORT"),
        (("tls://127.0.0.1:1", "--tls-key", "key.pem"), "go together"),
        (("tls://127.0.0.1:1", "--tls-ca", "/nowhere.pem"), "cannot fuzz tls://127.0.0.1:1: cannot connect"),
    ],
)
def test_bad_usage_and_nobody_there_are_status_2(options: tuple[str, ...], problem: str) -> None:
    process = fuzz_command(*options)
    said = "".join(process.communicate(timeout=15))
    assert problem in said
    assert "Traceback" not in said
    assert process.returncode == 2


def fuzz_command(*options: str) -> "subprocess.Popen[str]":
    """Without atheris, whether it is installed or not."""
    program = "import sys, runpy; sys.modules['atheris'] = None; sys.argv[0] = 'fuzz'; "
    program += "runpy.run_module('fuzz', run_name='__main__', alter_sys=True)"
    return subprocess.Popen(
        [sys.executable, "-c", program, "--target", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": "1"},
    )


# ------------------------------------------------------------------------------------ wrong on purpose


class AnotherKeysBytes(MemoryStore):
    """READ gives the newest object, whatever was asked for."""

    def open_read(self, namespace, keys):
        newest = next(reversed(self._objects), None)
        return [
            None
            if newest is None or (namespace, key) not in self._objects
            else self._lease(newest, is_use=False)
            for key in keys
        ]


class OldBytes(MemoryStore):
    """The first version of an object is the one that is kept."""

    def _put(self, subject, item):
        return Status.OK if subject in self._objects else super()._put(subject, item)


class KeepsDeleted(MemoryStore):
    """DELETE answers and does nothing."""

    async def delete_many(self, namespace, keys):
        await anyio.lowlevel.checkpoint()
        return self.exist(namespace, keys)


class TakesAnything(MemoryStore):
    """WRITE stores bytes that do not match their checksum, and makes one that does."""

    def _put(self, subject, item):
        return self._replace(subject, bytes(item.data), item.checksum)


class Fails(MemoryStore):
    """A bug in CHECK."""

    async def check_many(self, namespace, keys):
        raise RuntimeError("planted")


class AnswersTwice(Outbox):
    """Every answer without bytes goes out again."""

    def put_prompt(self, frame):
        super().put_prompt(frame)
        header = decode_header(memoryview(frame)[:HEADER_BYTES])
        if header.flags == Flag.REPLY and header.opcode is not Opcode.HELLO:
            super().put_prompt(frame)


class ForgetsAnItem(Outbox):
    """Of several items the last is not answered."""

    def put_prompt(self, frame):
        header = decode_header(memoryview(frame)[:HEADER_BYTES])
        message = decode_body(header.opcode, Flag.REPLY in header.flags, memoryview(frame)[HEADER_BYTES:])
        if isinstance(message, (StatusReply, ExistReply)) and len(message.statuses) > 2:
            body = encode_body(attrs.evolve(message, statuses=message.statuses[:-1]))
            short = attrs.evolve(header, body_bytes=len(body), body_crc=zlib.crc32(body))
            frame = encode_header(short) + body
        super().put_prompt(frame)


class HangsOnViolations(Session):
    async def _say_why(self, violation):
        await anyio.sleep_forever()


class SpeaksOnAfterError(Session):
    async def _say_why(self, violation):
        last = self._connection.error(violation.code, "")
        self._is_at_fault = True
        self._outbox.finish(last + last)
        await self._sent.wait()


class HangsUpInsteadOfAnswering(Session):
    """A FENCE ends the connection, without a word."""

    async def _take_request(self, request_id, message, requests):
        if type(message).__name__ == "Fence":
            self._over.cancel()
        await super()._take_request(request_id, message, requests)


class OthersWait(Session):
    """Once somebody has broken the protocol, nobody's requests are answered."""

    async def _take_request(self, request_id, message, requests):
        if self._shared.counters.violations:
            await anyio.sleep_forever()
        await super()._take_request(request_id, message, requests)


class StopsGreeting(Session):
    """Once somebody has broken the protocol, no HELLO is answered."""

    def _greet(self, hello):
        if not self._shared.counters.violations:
            super()._greet(hello)


WRONG: list[tuple[type[MemoryStore] | type[Outbox] | type[Session], str]] = [
    (AnotherKeysBytes, "bytes"),
    (OldBytes, "replaced or deleted|OK for an object whose bytes do not match"),
    (KeepsDeleted, "OK, and there can be nothing|replaced or deleted"),
    (TakesAnything, "OK for an object whose bytes do not match"),
    (Fails, "GATEWAY_FAULT"),
    (AnswersTwice, "not open"),
    (ForgetsAnItem, "leaves items unanswered"),
    (HangsOnViolations, "no end after that"),
    (SpeaksOnAfterError, "behind ERROR|after its ERROR"),
    (HangsUpInsteadOfAnswering, "in order, without a word"),
    (OthersWait, "no final answer"),
    (StopsGreeting, "no WELCOME"),
]


@pytest.mark.anyio
@pytest.mark.timeout(60)
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)  # as the command runs
@pytest.mark.parametrize(("part", "expected"), WRONG)
async def test_a_wrong_gateway_is_found_and_found_again(
    part: type[MemoryStore] | type[Outbox] | type[Session],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "case.json"
    with monkeypatch.context() as patch:
        store = part if issubclass(part, MemoryStore) else MemoryStore
        if issubclass(part, Session):
            patch.setattr(adp_gateway.server, "Session", part)
        elif issubclass(part, Outbox):
            patch.setattr(adp_gateway.session, "Outbox", part)
        async with serving(tmp_path, store()) as endpoint:
            run = await fuzzed(endpoint, case_file=file, deadline=1.0)
        assert run.status == 1
        assert run.written == file
        assert re.search(expected, run.finding or "")
        cases = load(file).cases
        async with serving(tmp_path, store()) as endpoint:
            again = await fuzzed(endpoint, replayed=cases, case_file=tmp_path / "again.json", deadline=1.0)
        assert again.status == 1
        assert re.search(expected, again.finding or "")
    async with serving(tmp_path, MemoryStore()) as endpoint:
        right = await fuzzed(endpoint, replayed=cases)
    assert right.finding is None
    assert right.status == 0


# ------------------------------------------------------------------------------------ cases


def test_cases_depend_on_the_seed_and_nothing_else() -> None:
    for number in range(30):
        case = generate(7, number, WELCOME)
        assert case == generate(7, number, WELCOME)
        assert case != generate(8, number, WELCOME)
        assert case.steps[0].do == "dial"
    kinds = {generate(7, number, WELCOME).kind for number in range(50)}
    assert kinds == {"valid", "nearly", "wild"}


def test_a_case_file_is_read_back(tmp_path: Path) -> None:
    cases = tuple(generate(7, number, WELCOME) for number in range(20))
    file = CaseFile(finding="it broke", seed=7, gateway={"agent": "x"}, cases=cases)
    save(tmp_path / "case.json", file, {0: ["WELCOME"]})
    assert load(tmp_path / "case.json") == file


def test_a_case_moves_to_other_namespaces_and_back() -> None:
    """Whole frames keep their checksums; damaged ones stay damaged."""
    for number in range(30):
        case = generate(7, number, WELCOME)
        there = moved(case, [bytes([n]) * 32 for n in range(2)])
        assert not any(namespace in step.data for step in there.steps for namespace in case.namespaces)
        assert moved(there, case.namespaces) == case


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "cases": 3}'])
def test_what_is_no_case_file_is_told(text: str, tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(text)
    with pytest.raises(BadCaseFile, match=str(file)):
        load(file)
