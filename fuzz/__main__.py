"""Two ways to fuzz.

Coverage-guided, in this process's own code (needs atheris):
    python -m fuzz [TARGET ...] [--seconds N]
Live, at a running gateway, anybody's:
    python -m fuzz --target ENDPOINT [--seconds N] [--seed S] [--connections N] [--replay FILE]

Exit status: 0 nothing found, 1 a finding (kept in fuzz/findings/, or in the case file that is named), 2 bad
usage, or a gateway that cannot be reached.
"""

import argparse
import sys
from pathlib import Path

from adp_client.testing.conformance.tls_options import add_tls_options
from adp_client.transport import Endpoint, parse_endpoint

TARGETS = ("gateway_stream", "client_stream", "handshake", "frames", "config", "store_image", "session")


def _endpoint(text: str) -> Endpoint:
    try:
        return parse_endpoint(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("targets", nargs="*", metavar="TARGET", help=f"default all: {', '.join(TARGETS)}")
    add("--seconds", type=int, default=60, metavar="N", help="for each target, or altogether (default 60)")
    add("--minimise", action="store_true", help="make fuzz/corpus anew from what earlier runs have found")
    add("--here", action="store_true", help=argparse.SUPPRESS)
    live = parser.add_argument_group("live")
    add = live.add_argument
    add(
        "--target",
        type=_endpoint,
        metavar="ENDPOINT",
        help="tcp://HOST:PORT, tls://HOST:PORT or unix:///PATH",
    )
    add("--seed", type=int, metavar="S", help="where the sequences come from (default: drawn, and told)")
    add("--connections", type=int, default=6, metavar="N", help="at a time, at least 3 (default 6)")
    add("--deadline", type=float, default=10.0, metavar="SECONDS", help="for any answer (default 10)")
    add("--replay", type=Path, metavar="FILE", help="run the sequences of a case file, and nothing else")
    add(
        "--case-file",
        type=Path,
        metavar="FILE",
        help="where a finding goes (default: in fuzz/findings/live/)",
    )
    token = live.add_mutually_exclusive_group()
    token.add_argument("--token", metavar="T", help="shown to the gateway; others on this machine can see it")
    token.add_argument("--token-file", type=Path, metavar="FILE", help="the token is in this file")
    add_tls_options(live)
    return parser


def main() -> int:
    """What was asked for."""
    parser = make_parser()
    chosen = parser.parse_args()
    if chosen.target is not None:
        if chosen.targets or chosen.minimise or chosen.here:
            parser.error("--target is for a running gateway; name no TARGET beside it")
        from .live.command import run

        return run(chosen, parser)
    if chosen.replay is not None:
        parser.error("--replay needs --target")
    unknown = [name for name in chosen.targets if name not in TARGETS]
    if unknown:
        parser.error(f"unknown target {', '.join(unknown)}; known: {', '.join(TARGETS)}")
    from . import coverage

    if chosen.here:
        coverage.fuzz_here(chosen.targets[0], chosen.seconds)
        return 0
    if chosen.minimise:
        coverage.minimise(chosen.targets or TARGETS)
        return 0
    return coverage.fuzz(chosen.targets or TARGETS, chosen.seconds)


if __name__ == "__main__":
    sys.exit(main())
