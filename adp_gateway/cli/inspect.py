"""`adp-gateway check`, `stat` and `dump`: what is in a store, and whether it is whole."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from adp_client.protocol.errors import ConfigError
from adp_gateway.errors import StorageError
from adp_gateway.fsck import check
from adp_gateway.inspection import StoreSummary, Totals, summarise, walk
from adp_gateway.store.format import MAX_KEY_BYTES, NAMESPACE_BYTES
from adp_gateway.store.quotas import PREFIX_BYTES
from adp_gateway.tenants import load_tenants

from .parsing import EXIT_FAILURE, EXIT_OK, EXIT_STORE, STORE_STATUS, OneLineParser
from .progress import Progress, duration, size

MOST_NAMESPACES = 20  # of a summary for people

_LIVE = (
    "May be used beside a running gateway: it reads only, and what it tells of a live store is approximate."
)


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `check`, `stat` and `dump`."""
    verify = _command(
        commands,
        "check",
        _check,
        help="verify every stored byte, with no gateway running",
        description="Verify every stored byte of a data directory, with no gateway running on it.",
        statuses="  0    all is whole, or was made so\n  1    damage is left",
    )
    verify.add_argument(
        "--repair", action="store_true", help="drop what is damaged, so that the rest is whole"
    )
    verify.add_argument(
        "--json", action="store_true", help="one JSON object a line: problems, then a summary"
    )
    verify.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="tell how far it is on standard error (default: if that is a terminal)",
    )
    stat = _command(
        commands,
        "stat",
        _stat,
        help="what a store holds, in numbers",
        description=f"What a store holds: objects, space, segments, namespaces. {_LIVE}",
        statuses="  0    told\n  1    some segments could not be read",
    )
    stat.add_argument("--json", action="store_true", help="everything, as one JSON object")
    stat.add_argument("--segments", action="store_true", help="each segment, not only all together")
    stat.add_argument(
        "--tenants", type=Path, metavar="FILE", help="name the tenants, whose namespaces are hashes else"
    )
    dump = _command(
        commands,
        "dump",
        _dump,
        help="list the objects of a store",
        description=f"List the objects of a store, segment by segment, in constant memory. {_LIVE} "
        "After a crash a key may be listed twice until a gateway was started: the higher sequence counts.",
        statuses="  0    listed\n  1    some segments could not be read",
    )
    dump.add_argument("--json", action="store_true", help="one JSON object a line")
    dump.add_argument(
        "--namespace", type=_prefix(NAMESPACE_BYTES), default=b"", metavar="HEX", help="that begin so"
    )
    dump.add_argument("--key", type=_prefix(MAX_KEY_BYTES), default=b"", metavar="HEX", help="that begin so")


def _command(
    commands: "argparse._SubParsersAction[Any]",
    name: str,
    function: Callable[[argparse.Namespace, OneLineParser], int],
    *,
    help: str,
    description: str,
    statuses: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"exit status:\n{statuses}\n  2    bad usage\n{STORE_STATUS}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def run(options: argparse.Namespace, named: OneLineParser) -> int:
        try:
            return function(options, named)
        except (BrokenPipeError, KeyboardInterrupt):
            raise
        except (OSError, StorageError) as exc:
            print(f"{named.prog}: {exc}", file=sys.stderr)
            return EXIT_STORE

    parser.set_defaults(function=run)
    parser.add_argument("--data", required=True, type=Path, metavar="DIR", help="the data directory")
    return parser


def _prefix(most_bytes: int) -> Callable[[str], bytes]:
    def parse(text: str) -> bytes:
        try:
            prefix = bytes.fromhex(text)
        except ValueError:
            prefix = None
        if prefix is None or len(prefix) > most_bytes:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no prefix: an even number of hexadecimal digits, at most {2 * most_bytes}"
            )
        return prefix

    return parse


def _check(options: argparse.Namespace, _parser: OneLineParser) -> int:
    is_told = sys.stderr.isatty() if options.progress is None else options.progress
    progress = Progress("check") if is_told else None
    try:
        report = check(options.data.absolute(), repair=options.repair, on_progress=progress)
    finally:
        if progress is not None:
            progress.finish()
    if options.json:
        for problem in report.problems:
            print(json.dumps({"problem": problem.damage.name.lower(), **problem.fields()}))
        facts = attrs.asdict(report, filter=lambda field, _: field.name != "problems")
        print(json.dumps({**facts, "problems": len(report.problems)}))
    else:
        for problem in report.problems:
            print(problem)
        print(
            f"{report.objects} whole objects of {report.object_bytes} bytes in {report.segments} segments; "
            f"{len(report.problems)} problems, {report.repaired} repaired"
        )
    return EXIT_OK if report.is_clean else EXIT_FAILURE


def _dump(options: argparse.Namespace, _parser: OneLineParser) -> int:
    status = EXIT_OK
    write = sys.stdout.write
    if not options.json:
        write("# namespace key length checksum segment offset sequence\n")
    for found in walk(options.data.absolute(), namespace=options.namespace, key=options.key):
        if isinstance(found, str):
            print(f"adp-gateway dump: {found}", file=sys.stderr)
            status = EXIT_FAILURE
            continue
        segment_id, record = found
        namespace, key, checksum = record.namespace.hex(), record.key.hex(), f"{record.checksum:016x}"
        if options.json:
            write(
                f'{{"namespace": "{namespace}", "key": "{key}", "length": {record.length}, '
                f'"checksum": "{checksum}", "segment": {segment_id}, "offset": {record.offset}, '
                f'"sequence": {record.sequence}}}\n'
            )
        else:
            write(
                f"{namespace} {key} {record.length} {checksum} {segment_id} {record.offset} "
                f"{record.sequence}\n"
            )
    sys.stdout.flush()
    return status


def _stat(options: argparse.Namespace, parser: OneLineParser) -> int:
    tenants: dict[bytes, tuple[str, int | None]] = {}
    if options.tenants is not None:
        try:
            for tenant in load_tenants(options.tenants)[0]:
                tenants[tenant.account.prefix] = (tenant.name, tenant.quota_bytes)
        except ConfigError as exc:
            parser.error(f"argument --tenants: {'; '.join(exc.problems)}")
    summary = summarise(options.data.absolute())
    owned: dict[str, tuple[Totals, int | None]] = {}
    for prefix, (name, quota_bytes) in tenants.items():
        parts = [part for names, part in summary.namespaces.items() if names[:PREFIX_BYTES] == prefix]
        total = Totals(
            sum(part.objects for part in parts),
            sum(part.object_bytes for part in parts),
            sum(part.charged_bytes for part in parts),
        )
        owned[name] = (total, quota_bytes)
    if options.json:
        print(json.dumps(_as_json(summary, owned)))
    else:
        print("\n".join(_as_text(summary, owned, has_segments=options.segments)))
    for problem in summary.unreadable:
        print(f"adp-gateway stat: {problem}", file=sys.stderr)
    return EXIT_FAILURE if summary.unreadable else EXIT_OK


def _as_json(summary: StoreSummary, owned: dict[str, tuple[Totals, int | None]]) -> dict[str, Any]:
    totals = summary.totals
    return {
        "directory": str(summary.directory),
        "format_version": summary.format_version,
        "is_in_use": summary.is_in_use,
        "objects": totals.objects,
        "object_bytes": totals.object_bytes,
        "live_bytes": totals.charged_bytes,
        "device_bytes": sum(segment.device_bytes for segment in summary.segments),
        "free_bytes": summary.free_bytes,
        "unreadable_segments": len(summary.unreadable),
        "namespaces": {name.hex(): attrs.asdict(part) for name, part in sorted(summary.namespaces.items())},
        "tenants": {
            name: {**attrs.asdict(part), "quota_bytes": quota_bytes}
            for name, (part, quota_bytes) in owned.items()
        },
        "segments": [
            {**attrs.asdict(segment), "dead_bytes": segment.dead_bytes} for segment in summary.segments
        ],
    }


def _as_text(
    summary: StoreSummary, owned: dict[str, tuple[Totals, int | None]], *, has_segments: bool
) -> list[str]:
    totals, segments = summary.totals, summary.segments
    device_bytes = sum(segment.device_bytes for segment in segments)
    dead_bytes = sum(segment.dead_bytes for segment in segments)
    use = {True: "in use by a gateway", False: "not in use", None: "perhaps in use"}[summary.is_in_use]
    lines = [
        f"store       {summary.directory}, format {summary.format_version}, {use}",
        f"objects     {totals.objects}, {size(totals.object_bytes)}",
        f"on device   {size(device_bytes)} in {len(segments)} segments: {size(totals.charged_bytes)} live, "
        f"{size(dead_bytes)} dead or reserved{_share(dead_bytes, device_bytes)}",
        f"free        {size(summary.free_bytes)} on this file system",
    ]
    if segments:
        ages = [segment.age_seconds for segment in segments]
        lines.append(
            f"age         last written {duration(min(ages))} ago, oldest segment {duration(max(ages))} ago"
        )
    damaged = sum(segment.damaged_records for segment in segments)
    torn = sum(segment.torn_bytes for segment in segments)
    if damaged or torn:
        lines.append(f"damage      {damaged} journal records, {torn} bytes of torn journals: see `check`")
    if owned:
        lines += ["", f"{'tenant':<24} {'objects':>12} {'bytes':>12} {'charged':>12} {'quota':>12}"]
        for name, (part, quota_bytes) in owned.items():
            quota = "none" if quota_bytes is None else size(quota_bytes)
            lines.append(
                f"{name:<24} {part.objects:>12} {size(part.object_bytes):>12} {size(part.charged_bytes):>12} "
                f"{quota:>12}"
            )
    if summary.namespaces:
        lines += ["", f"{'namespace':<24} {'objects':>12} {'bytes':>12}"]
        largest = sorted(summary.namespaces.items(), key=lambda pair: -pair[1].object_bytes)
        for namespace, part in largest[:MOST_NAMESPACES]:
            lines.append(f"{namespace.hex()[:24]:<24} {part.objects:>12} {size(part.object_bytes):>12}")
        if len(largest) > MOST_NAMESPACES:
            lines.append(f"and {len(largest) - MOST_NAMESPACES} more: --json has all")
    if has_segments:
        lines += ["", f"{'segment':>10} {'objects':>10} {'live':>12} {'dead':>12} {'':>6} {'written':>16}"]
        for segment in segments:
            share = _share(segment.dead_bytes, segment.device_bytes).strip(" ()")
            lines.append(
                f"{segment.segment_id:>10} {segment.objects:>10} {size(segment.live_bytes):>12} "
                f"{size(segment.dead_bytes):>12} {share:>6} {duration(segment.age_seconds):>12} ago"
            )
    return lines


def _share(part: int, whole: int) -> str:
    return f" ({100 * part / whole:.0f}%)" if whole else ""
