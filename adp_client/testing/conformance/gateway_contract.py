"""The contract of a gateway: every clause, tried in turn on connections of its own."""

from collections.abc import Callable, Sequence

import anyio

from adp_client.protocol.constants import Feature
from adp_client.protocol.messages import Hello, Welcome

from .clause import Broken, Clause, Level, NotApplicable, Report, Result, Verdict
from .credits import CREDITS
from .framing import FRAMING
from .handshake import HANDSHAKE
from .leases import LEASES
from .lookups import LOOKUPS
from .order import ORDER
from .peer import ConnectionEnded, Peer
from .reading import READING
from .regions import REGIONS
from .removal import REMOVAL
from .trial import EVERYTHING, Dial, Trial
from .writing import WRITING

#: Every clause, in the order of the chapters.
GATEWAY_CLAUSES: tuple[Clause[Trial], ...] = tuple(
    clause
    for chapter in (FRAMING, HANDSHAKE, LOOKUPS, READING, WRITING, REMOVAL, ORDER, LEASES, REGIONS, CREDITS)
    for clause in chapter.clauses
)

Tell = Callable[[Result], None]


class NoGateway(Exception):
    """Nothing answers as a gateway does, so there is nothing to check. The text says what came instead."""


async def check_gateway_contract(
    dial: Dial,
    *,
    token: bytes | None = None,
    level: Level = Level.GATEWAY,
    seconds: float = 10.0,
    at_once: int = 8,
    only: Sequence[str] = (),
    tell: Tell | None = None,
) -> Report:
    """Try every clause (or those with the ids `only`) on the gateway that `dial` reaches.

    A clause that needs a feature is tried if the gateway announces the feature, at every level: what is
    announced must work. Level full demands that LEASES, REGIONS and CREDITS are announced.

    dial: a new connection each time.
    token: what to show; with one, wrong tokens are tried as well.
    seconds: for one clause; a gateway that is not done by then has failed it.
    at_once: how many clauses are tried side by side. They share nothing but the gateway; most of their time
        they wait for it to close connections.
    tell: is called with each result as it comes.

    Raises NoGateway if the first handshake fails. Cancellation closes every connection. What was written is
    deleted again, as far as the gateway obeys.
    """
    welcome = await _introduce(dial, token, seconds)
    clauses = [clause for clause in GATEWAY_CLAUSES if not only or clause.id in only]
    results: dict[str, Result] = {}
    turns = anyio.CapacityLimiter(at_once)

    async def run(clause: Clause[Trial]) -> None:
        async with turns:
            result = results[clause.id] = await _try(clause, dial, token, welcome, level, seconds)
        if tell is not None:
            tell(result)

    async with anyio.create_task_group() as tasks:
        for clause in clauses:
            tasks.start_soon(run, clause)
    return Report(results=tuple(results[clause.id] for clause in clauses))


async def _introduce(dial: Dial, token: bytes | None, seconds: float) -> Welcome:
    """What the gateway says to a client that can do everything."""
    try:
        with anyio.fail_after(seconds):
            peer = Peer(await dial(), Hello(features=EVERYTHING, token=token or b"", agent="conformance"))
            try:
                return await peer.greet()
            finally:
                await peer.transport.aclose()
    except TimeoutError:
        raise NoGateway(f"no WELCOME within {seconds:g} s") from None
    except (OSError, EOFError, ConnectionEnded, Broken) as exc:
        raise NoGateway(str(exc) or type(exc).__name__) from exc


async def _try(
    clause: Clause[Trial],
    dial: Dial,
    token: bytes | None,
    welcome: Welcome,
    level: Level,
    seconds: float,
) -> Result:
    missing = clause.needs & ~welcome.features
    if missing:
        return clause.result(Verdict.SKIPPED, f"the gateway does not announce {_names(missing)}")
    if clause.level is Level.FULL and not clause.needs and level is not Level.FULL:
        return clause.result(Verdict.SKIPPED, "for level full")
    trial = Trial(dial, token=token, welcome=welcome)
    try:
        with anyio.fail_after(seconds):
            await clause.check(trial)
    except NotApplicable as exc:
        return clause.result(Verdict.SKIPPED, str(exc))
    except Broken as exc:
        return clause.result(Verdict.FAILED, str(exc))
    except ConnectionEnded as exc:
        return clause.result(Verdict.FAILED, f"expected {trial.awaits}, got the end: {exc}")
    except TimeoutError:
        return clause.result(Verdict.FAILED, f"expected {trial.awaits}, got nothing in {seconds:g} s")
    except (OSError, EOFError) as exc:
        return clause.result(Verdict.FAILED, f"expected {trial.awaits}, got {type(exc).__name__}: {exc}")
    finally:
        await trial.close()
    return clause.result(Verdict.PASSED)


def _names(features: Feature) -> str:
    return ", ".join(feature.name or "" for feature in Feature if feature and feature & features)
