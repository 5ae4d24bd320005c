"""Try the gateway contract on a server: `python -m adp_client.testing.conformance ENDPOINT`.

Exit status: 0 every clause is kept, 1 one is not, 2 bad usage or no gateway there.
"""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import anyio

from adp_client.transport import Endpoint, TLSConfig, Transport, connect, parse_endpoint

from .clause import Level, Report, Result, Verdict
from .gateway_contract import GATEWAY_CLAUSES, NoGateway, check_gateway_contract
from .tls_options import add_tls_options, chosen_tls

KEPT, NOT_KEPT, UNUSABLE = 0, 1, 2
_ID_WIDTH = max(len(clause.id) for clause in GATEWAY_CLAUSES)


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m adp_client.testing.conformance",
        description="Try the gateway contract of ADP/1 on a server. It writes small objects to namespaces of "
        "its own, and deletes them again.",
        epilog="Exit status: 0 every clause is kept, 1 one is not, 2 bad usage or no gateway there.",
    )
    parser.add_argument(
        "endpoint", nargs="?", metavar="ENDPOINT", help="tcp://HOST:PORT, tls://HOST:PORT or unix:///PATH"
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="the token to show, in this file")
    add_tls_options(parser)
    parser.add_argument(
        "--level",
        choices=[level.value for level in Level],
        default=Level.GATEWAY.value,
        help="of the spec's section 10; `full` demands the optional features too (default gateway)",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="CLAUSE", help="this clause; may be repeated"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=10.0, metavar="S", help="seconds for one clause (default 10)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file too")
    parser.add_argument("--list", action="store_true", help="list the clauses, and try nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.list:
        for clause in GATEWAY_CLAUSES:
            print(f"{clause.id:{_ID_WIDTH}}  {clause.level.value:7}  {clause.statement}")
        return KEPT
    if options.endpoint is None:
        parser.error("an ENDPOINT is needed")
    unknown = sorted(set(options.only) - {clause.id for clause in GATEWAY_CLAUSES})
    if unknown:
        parser.error(f"no such clause: {', '.join(unknown)} (--list lists them)")
    try:
        endpoint = parse_endpoint(options.endpoint)
        token = None if options.token_file is None else options.token_file.read_bytes().strip()
        tls = chosen_tls(endpoint, options)
    except (OSError, ValueError) as exc:
        parser.error(str(exc))
    try:
        report = anyio.run(_check, endpoint, token, tls, options)
    except NoGateway as exc:
        print(f"no gateway at {endpoint}: {exc}", file=sys.stderr)
        return UNUSABLE
    if options.json is not None:
        try:
            options.json.write_text(to_json(report, endpoint))
        except OSError as exc:
            print(f"cannot write {options.json}: {exc.strerror}", file=sys.stderr)
            return UNUSABLE
    print(
        f"{endpoint}: {report.count(Verdict.PASSED)} kept, {report.count(Verdict.FAILED)} not kept, "
        f"{report.count(Verdict.SKIPPED)} skipped"
    )
    return KEPT if report.is_kept else NOT_KEPT


async def _check(
    endpoint: Endpoint, token: bytes | None, tls: TLSConfig | None, options: argparse.Namespace
) -> Report:
    async def dial() -> Transport:
        return await connect(endpoint, tls=tls)

    return await check_gateway_contract(
        dial,
        token=token,
        level=Level(options.level),
        seconds=options.timeout,
        only=options.only,
        tell=lambda result: print(row(result), flush=True),
    )


def row(result: Result) -> str:
    """One line of the table; what went wrong goes below it."""
    line = f"{result.id:{_ID_WIDTH}}  {result.section:5}  {result.verdict.value}"
    if result.verdict is Verdict.SKIPPED:
        return f"{line}  {result.sentence}"
    if result.verdict is Verdict.FAILED:
        width = shutil.get_terminal_size((110, 24)).columns
        for text in (result.statement, result.sentence):
            line += "\n" + textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    ")
    return line


def to_json(report: Report, endpoint: Endpoint) -> str:
    """The results for programs."""
    clauses = [
        {
            "id": result.id,
            "section": result.section,
            "verdict": result.verdict.value,
            "statement": result.statement,
            "sentence": result.sentence,
        }
        for result in report.results
    ]
    return json.dumps({"endpoint": str(endpoint), "is_kept": report.is_kept, "clauses": clauses}, indent=2)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 3600")
    return value


if __name__ == "__main__":
    sys.exit(main())
