"""The command `adp-gateway`.

Standard output has one line, `ready ENDPOINT...`, written when clients can connect: a script can wait for it.
Everything else that is said goes to standard error.
"""

import argparse
import functools
import ipaddress
import logging
import re
import signal
import ssl
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import anyio
import anyio.abc
import attrs

from adp_client.protocol.errors import ConfigError
from adp_client.transport import Endpoint, TCPEndpoint, TLSEndpoint, TLSFailure, UnixEndpoint, parse_endpoint
from adp_client.transport.trust import server_context

from . import logs
from .config import GatewayConfig, StoreConfig
from .errors import StorageError
from .fsck import check
from .server import AGENT, Server
from .sizes import size_of
from .store.segments import SegmentStore
from .tenants import Tenant, is_readable_by_all, load_tenants, read_token

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_SIGNAL = 128  # plus the number of the signal

DEFAULT_PORT = 7171
SOCKET_NAME = "gateway.sock"

EPILOG = """\
exit status:
  0    served, and drained after SIGTERM or SIGINT
  1    failed: a port in use, a directory that cannot be used, a device that broke
  2    bad usage: one line on standard error names the option
  130  a second SIGINT cut the drain short (143: a second SIGTERM)

When clients can connect, one line is written to standard output:
  ready ENDPOINT [ENDPOINT...]
"""

_OPTIONS = {
    "directory": "--data",
    "capacity_bytes": "--capacity",
    "segment_bytes": "--segment",
    "max_command_bytes": "--max-command",
    "max_object_bytes": "--max-object",
    "io_threads": "--io-threads",
    "durability": "--durability",
    "grace_seconds": "--grace",
    "max_sessions": "--max-connections",
    "listen": "--listen",
    "tls": "--tls-certificate and --tls-key",
    "certificate_file": "--tls-certificate",
    "key_file": "--tls-key",
    "client_ca_file": "--tls-client-ca",
    "incoming_bytes": "--incoming-memory",
}


class OneLineParser(argparse.ArgumentParser):
    """Bad usage is one line, without the usage text around it."""

    def error(self, message: str) -> NoReturn:
        """One line, exit status 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")


def parse_size(text: str) -> int:
    """`100GiB`, `512M`, `4096`: bytes, in powers of 1024. Raises ArgumentTypeError."""
    try:
        return size_of(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _endpoint(text: str) -> Endpoint:
    try:
        return parse_endpoint(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


@attrs.frozen
class _Secrets:
    """What was read from `--token-file` or `--tenants`, and from where."""

    token: bytes | None = attrs.field(default=None, repr=False)
    tenants: tuple[Tenant, ...] = ()
    files: tuple[Path, ...] = ()


def _token_file(text: str) -> _Secrets:
    try:
        return _Secrets(token=read_token(Path(text)), files=(Path(text),))
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _tenants(text: str) -> _Secrets:
    try:
        tenants, files = load_tenants(Path(text))
    except ConfigError as exc:
        raise argparse.ArgumentTypeError("; ".join(exc.problems)) from None
    return _Secrets(tenants=tenants, files=files)


def make_parser() -> OneLineParser:
    """The command line."""
    parser = OneLineParser(prog="adp-gateway", description="Keep KV cache objects on local storage.")
    parser.add_argument("--version", action="version", version=AGENT)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a data directory until SIGTERM or SIGINT",
        description="Serve a data directory until SIGTERM or SIGINT. Sizes are like 512MiB or 100GiB.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.set_defaults(function=_serve)
    add = serve.add_argument
    add("--data", required=True, type=Path, metavar="DIR", help="where the objects are; made if absent")
    add(
        "--listen",
        action="append",
        type=_endpoint,
        metavar="ENDPOINT",
        help=f"tcp://HOST:PORT, tls://HOST:PORT or unix:///PATH; may be given more than once (default: "
        f"tcp://127.0.0.1:{DEFAULT_PORT} and unix://DIR/{SOCKET_NAME})",
    )
    add(
        "--capacity",
        type=parse_size,
        metavar="SIZE",
        help="hard limit on disk: objects, journals and reserves together (default: 80%% of what is free)",
    )
    who = serve.add_mutually_exclusive_group()
    who.add_argument(
        "--token-file",
        dest="secrets",
        type=_token_file,
        metavar="FILE",
        help="clients must show the token in this file",
    )
    who.add_argument(
        "--tenants",
        dest="secrets",
        type=_tenants,
        metavar="FILE",
        help="TOML: a token, and a quota if you like, for each tenant; none sees another's objects",
    )
    add(
        "--insecure-no-token",
        action="store_true",
        help="listen beyond this machine for everybody who can reach it",
    )
    add("--tls-certificate", metavar="FILE", help="PEM, for tls://: this gateway's certificate and its chain")
    add("--tls-key", metavar="FILE", help="PEM: the private key of the certificate")
    add("--tls-client-ca", metavar="FILE", help="PEM: clients on tls:// must show a certificate of these")
    add(
        "--durability",
        choices=("relaxed", "durable"),
        default="relaxed",
        help="what an acknowledged object survives: the death of the process, or a power cut too "
        "(default: %(default)s)",
    )
    add(
        "--max-object",
        type=parse_size,
        default=64 << 20,
        metavar="SIZE",
        help="largest object (default: 64MiB)",
    )
    add(
        "--max-command",
        type=parse_size,
        default=256 << 10,
        metavar="SIZE",
        help="longest command for the device; larger objects are cut (default: 256KiB)",
    )
    add("--segment", type=parse_size, metavar="SIZE", help="what is evicted as a unit (default: by capacity)")
    add(
        "--io-threads",
        type=int,
        default=8,
        metavar="N",
        help="for reads, and as many for writes (default: 8)",
    )
    add("--incoming-memory", type=parse_size, default=512 << 20, metavar="SIZE", help="default: 512MiB")
    add("--max-connections", type=int, default=1024, metavar="N", help="at a time (default: 1024)")
    add("--grace", type=float, default=10.0, metavar="SECONDS", help="for clients to leave (default: 10)")
    add("--log-format", choices=("text", "json"), default="text", help="default: %(default)s")
    verify = commands.add_parser(
        "check",
        help="verify every stored byte, with no gateway running",
        description="Verify every stored byte of a data directory, with no gateway running on it.",
        epilog="exit status: 0 all is whole, or was made so; 1 damage, or no directory that can be used",
    )
    verify.set_defaults(function=_check)
    verify.add_argument("--data", required=True, type=Path, metavar="DIR", help="the data directory")
    verify.add_argument(
        "--repair", action="store_true", help="drop what is damaged, so that the rest is whole"
    )
    return parser


def _check(options: argparse.Namespace, _parser: OneLineParser) -> int:
    try:
        report = check(options.data.absolute(), repair=options.repair)
    except (OSError, StorageError) as exc:
        print(f"adp-gateway check: {exc}", file=sys.stderr)
        return EXIT_FAILURE
    for problem in report.problems:
        print(problem)
    print(
        f"{report.objects} whole objects of {report.object_bytes} bytes in {report.segments} segments; "
        f"{len(report.problems)} problems, {report.repaired} repaired"
    )
    return EXIT_OK if report.is_clean else EXIT_FAILURE


def _config(options: argparse.Namespace) -> GatewayConfig:
    """Raises ValueError, TypeError or TLSFailure that names the option."""
    data: Path = options.data.absolute()
    listen: list[Endpoint] | None = options.listen
    if listen is None:
        try:
            local = parse_endpoint(f"unix://{data / SOCKET_NAME}")
        except ValueError as exc:
            raise ValueError(f"--data is too long for the default --listen: {exc}") from None
        listen = [TCPEndpoint(host="127.0.0.1", port=DEFAULT_PORT), local]
    secrets: _Secrets = options.secrets or _Secrets()
    config = GatewayConfig(
        store=StoreConfig(
            directory=data,
            capacity_bytes=options.capacity,
            segment_bytes=options.segment,
            max_command_bytes=options.max_command,
            max_object_bytes=options.max_object,
            durability=options.durability,
            io_threads=options.io_threads,
            accounts=tuple(tenant.account for tenant in secrets.tenants),
        ),
        listen=tuple(dict.fromkeys(listen)),
        tls=_tls(options),
        token=secrets.token,
        tenants=secrets.tenants,
        grace_seconds=options.grace,
        max_sessions=options.max_connections,
        incoming_bytes=options.incoming_memory,
    )
    if not options.insecure_no_token:
        for endpoint in _open_doors(config):
            raise ValueError(
                f"argument --listen: everybody who reaches {endpoint} could use it: "
                "give --token-file, --tenants or --tls-client-ca, or say --insecure-no-token"
            )
    return config


def _tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    certificate, key, client_ca = options.tls_certificate, options.tls_key, options.tls_client_ca
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise ValueError("'certificate_file' and 'key_file' go together")
    return server_context(certificate_file=certificate, key_file=key, client_ca_file=client_ca)


def _serve(options: argparse.Namespace, parser: OneLineParser) -> int:
    try:
        config = _config(options)
    except (ValueError, TypeError, TLSFailure) as exc:
        parser.error(_with_options(str(exc.args[0] if exc.args else exc)))
    logs.configure(options.log_format)
    for path in filter(is_readable_by_all, options.secrets.files if options.secrets else ()):
        log.warning("every user of this machine can read the token in %s", path)
    try:
        return anyio.run(_serve_until_signal, config)
    except* (OSError, StorageError) as group:
        # Alone or in a group: the first is the reason, the rest its consequences.
        reason: BaseException = group
        while isinstance(reason, BaseExceptionGroup):
            reason = reason.exceptions[0]
        log.error("%s", re.sub(r"^\[Errno -?\d+\] ", "", str(reason)))
    return EXIT_FAILURE


def _with_options(problem: str) -> str:
    """The same problem, in the words of the command line."""
    return re.sub(r"'(\w+)'", lambda found: _OPTIONS.get(found[1], found[0]), problem, count=2)


async def _serve_until_signal(config: GatewayConfig) -> int:
    status = [EXIT_OK]
    async with SegmentStore.open(config.store) as store, anyio.create_task_group() as tasks:
        server = Server(config, store)
        await tasks.start(_watch_signals, server, tasks.cancel_scope, status)
        async with anyio.create_task_group() as serving:
            listeners = await serving.start(server.serve)
            endpoints = " ".join(str(listener.endpoint) for listener in listeners)
            stats = store.stats()
            facts = {
                "endpoints": endpoints,
                "data": str(config.store.directory),
                "capacity_bytes": stats.capacity_bytes,
                "boot_id": server.boot_id.hex(),
                "objects": stats.objects,
                "object_bytes": stats.object_bytes,
            }
            for account in stats.accounts:
                quota = "no quota" if account.quota_bytes is None else f"quota {account.quota_bytes}"
                log.info(
                    "tenant %s: %d objects, %d bytes, %s",
                    account.name,
                    account.objects,
                    account.used_bytes,
                    quota,
                    extra={"data": attrs.asdict(account)},
                )
            log.info(
                "serving %s: %s",
                endpoints,
                ", ".join(f"{name} {value}" for name, value in list(facts.items())[1:]),
                extra={"data": facts},
            )
            quota_bytes = sum(account.quota_bytes or 0 for account in stats.accounts)
            if quota_bytes > stats.capacity_bytes // 2:
                log.warning(
                    "the quotas are %d bytes together, above half of the capacity: a busy tenant may cost "
                    "others their coldest objects",
                    quota_bytes,
                )
            _warn_of_open_doors(config)
            print(f"ready {endpoints}", flush=True)
        tasks.cancel_scope.cancel()
    log.info("stopped: status %d", status[0])
    return status[0]


async def _watch_signals(
    server: Server,
    scope: anyio.CancelScope,
    status: list[int],
    *,
    task_status: anyio.abc.TaskStatus[None],
) -> None:
    """The first signal drains, the second cuts."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        is_draining = False
        async for number in signals:
            if is_draining:
                log.warning("%s again: cutting all connections", signal.Signals(number).name)
                status[0] = EXIT_SIGNAL + number
                scope.cancel()
                return
            is_draining = True
            log.info("%s: draining", signal.Signals(number).name)
            server.drain()


def _warn_of_open_doors(config: GatewayConfig) -> None:
    for endpoint in _open_doors(config):
        log.warning("%s is open to everyone who reaches it: there is no token", endpoint)
    if config.token is not None or config.tenants:
        for endpoint in config.listen:
            if isinstance(endpoint, TCPEndpoint) and _is_reachable(endpoint):
                log.warning("%s: the token and the objects travel in the clear: tls:// encrypts", endpoint)


def _open_doors(config: GatewayConfig) -> list[Endpoint]:
    """Where somebody on another machine could come in without showing anything."""
    if config.token is not None or config.tenants:
        return []
    has_certificates = config.tls is not None and config.tls.verify_mode is ssl.CERT_REQUIRED
    return [
        endpoint
        for endpoint in config.listen
        if _is_reachable(endpoint) and not (has_certificates and isinstance(endpoint, TLSEndpoint))
    ]


def _is_reachable(endpoint: Endpoint) -> bool:
    """Whether somebody on another machine could connect."""
    if isinstance(endpoint, UnixEndpoint) or endpoint.host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(endpoint.host).is_loopback
    except ValueError:
        return True  # a name, of whatever


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status, or raises SystemExit for bad usage and --help."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    function: Callable[[argparse.Namespace, OneLineParser], int] = options.function
    # Bad values are told in the name of the subcommand, as argparse does it.
    named = OneLineParser(prog=f"{parser.prog} {options.command}")
    try:
        return functools.partial(function, options, named)()
    except KeyboardInterrupt:
        return EXIT_SIGNAL + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
