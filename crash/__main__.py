"""Crash a gateway on purpose and look what is left (docs/how-to/prove-the-crash-contract.md).

    python -m crash                     50 loops of storms and `kill -9` on real processes
    python -m crash --loops 1000        more of them
    python -m crash --seed S --loop K   one of them again
    python -m crash power --cuts N      N power cuts at the commands of a simulated device
    python -m crash damage --flips N    N flipped bits, and what else a disk can do to files

Exit status: 0 PASS, 1 FAIL, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import logging
import random
import sys
import time
from collections.abc import Awaitable, Callable

import anyio

from . import damage, kills, power
from .problems import Report, to_table

EXIT_INTERRUPTED = 130


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m crash", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", nargs="?", choices=["kill", "power", "damage"], default="kill")
    add("--seed", type=int, metavar="S", help="where everything is drawn from (default: drawn, and told)")
    add("--loops", type=int, default=50, metavar="N", help="kill: how many loops (default 50)")
    add("--cuts", type=int, default=20_000, metavar="N", help="power: how many cuts (default 20,000)")
    add("--flips", type=int, default=10_000, metavar="N", help="damage: how many bits (default 10,000)")
    add("--loop", type=int, metavar="K", help="kill: this loop of the seed and no other")
    return parser


def main() -> int:
    """What was asked for."""
    parser = make_parser()
    options = parser.parse_args()
    if min(options.loops, options.cuts, options.flips) < 1:
        parser.error("--loops, --cuts and --flips must be at least 1")
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    for name in ("adp_client", "adp_gateway"):  # that connections break, and records, is the point
        logging.getLogger(name).setLevel(logging.ERROR)
    say(f"seed {seed}")
    numbers = [options.loop] if options.loop is not None else list(range(options.loops))
    runs: dict[str, Callable[[], Awaitable[Report]]] = {
        "kill": functools.partial(kills.run, seed, numbers, say=say),
        "damage": functools.partial(damage.run, seed, options.flips, say=say),
        "power": functools.partial(power.run, seed, options.cuts, say=say),
    }
    try:
        report = anyio.run(runs[options.what])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print("\n" + to_table(report))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
