"""The contract of a client, with a gateway that plays a part; and `adp_client.Client`, adapted."""

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from adp_client.client import Client
from adp_client.config import BackoffConfig, ClientConfig, Timeouts
from adp_client.protocol.constants import ErrorCode
from adp_client.transport.base import Transport
from adp_client.transport.endpoints import Endpoint

from .clause import Broken, Clause, NotApplicable, Report, Result, Verdict
from .conduct import CONDUCT
from .scene import Dial, RunClient, Scene

#: Every clause, in order.
CLIENT_CLAUSES: tuple[Clause[Scene], ...] = tuple(CONDUCT.clauses)

Tell = Callable[[Result], None]


async def check_client_contract(
    run_client: RunClient,
    *,
    seconds: float = 10.0,
    only: Sequence[str] = (),
    tell: Tell | None = None,
) -> Report:
    """Try every clause (or those with the ids `only`), one after the other, on clients of `run_client`.

    run_client: called with a function that dials the gateway of the clause; see ClientUnderTest.
    seconds: for one clause. The client's own deadlines should be well below.
    tell: is called with each result as it comes.
    """
    results: list[Result] = []
    for clause in CLIENT_CLAUSES:
        if only and clause.id not in only:
            continue
        results.append(await _try(clause, run_client, seconds))
        if tell is not None:
            tell(results[-1])
    return Report(results=tuple(results))


async def _try(clause: Clause[Scene], run_client: RunClient, seconds: float) -> Result:
    scene = Scene(run_client)
    verdict, sentence = Verdict.PASSED, ""
    try:
        with anyio.fail_after(seconds):
            await clause.check(scene)
    except TimeoutError:
        verdict, sentence = Verdict.FAILED, f"expected {scene.awaits}, got nothing in {seconds:g} s"
    except Exception as exc:  # whatever the client raises, or what it returns leads to, is about the client
        cause = _first(exc)
        if isinstance(cause, NotApplicable):
            verdict, sentence = Verdict.SKIPPED, str(cause)
        elif isinstance(cause, Broken):
            verdict, sentence = Verdict.FAILED, str(cause)
        else:
            words = f"{type(cause).__name__}: {cause}"
            verdict, sentence = Verdict.FAILED, f"expected {scene.awaits}, got {words}"
    return clause.result(verdict, sentence)


def _first(error: Exception) -> Exception:
    """What went wrong: a client that runs in a task group wraps what is raised around it."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


# ---------------------------------------------------------------- the project's own client


class AdaptedClient:
    """`adp_client.Client` as a ClientUnderTest."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def exist(self, namespace: bytes, keys: Sequence[bytes]) -> Sequence[int]:
        """See ClientUnderTest."""
        return (await self._client.exist(namespace, keys)).statuses

    async def read(
        self, namespace: bytes, keys: Sequence[bytes], capacities: Sequence[int]
    ) -> Sequence[bytes | None]:
        """See ClientUnderTest."""
        memory = [bytearray(capacity) for capacity in capacities]
        result = await self._client.read(namespace, keys, memory)
        return [
            bytes(buffer[:length]) if status == ErrorCode.OK else None
            for status, buffer, length in zip(result.statuses, memory, result.lengths, strict=True)
        ]

    async def write(self, namespace: bytes, keys: Sequence[bytes], objects: Sequence[bytes]) -> Sequence[int]:
        """See ClientUnderTest."""
        return (await self._client.write(namespace, keys, objects)).statuses

    async def delete(self, namespace: bytes, keys: Sequence[bytes]) -> Sequence[int]:
        """See ClientUnderTest."""
        return (await self._client.delete(namespace, keys)).statuses

    async def fence(self) -> None:
        """See ClientUnderTest."""
        await self._client.fence()


@asynccontextmanager
async def run_adp_client(dial: Dial) -> AsyncGenerator[AdaptedClient]:
    """A RunClient for `adp_client.Client`, with short deadlines."""

    async def dial_endpoint(endpoint: Endpoint) -> Transport:
        return await dial()

    config = ClientConfig(
        endpoint="tcp://conformance.test:7171",
        timeouts=Timeouts(exist_seconds=0.5, request_seconds=3.0, goodbye_seconds=1.0),
        backoff=BackoffConfig(initial_seconds=0.01, cap_seconds=0.05),
    )
    async with Client(config, dial=dial_endpoint, source=random.Random(0)) as client:
        yield AdaptedClient(client)
