"""`adp-gateway serve`: from settings to a configuration, and from there to `serving`."""

import argparse
import ipaddress
import logging
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio

from adp_client.protocol.errors import ConfigError
from adp_client.transport import Endpoint, TCPEndpoint, TLSEndpoint, TLSFailure, UnixEndpoint, parse_endpoint
from adp_client.transport.trust import server_context
from adp_gateway import logs
from adp_gateway.config import GatewayConfig, StoreConfig
from adp_gateway.errors import StorageError
from adp_gateway.roster import check_shares
from adp_gateway.serving import serve_until_signal
from adp_gateway.tenants import Tenant, is_readable_by_all, load_tenants, read_token
from adp_gateway.workers import Assignment, supervise

from .parsing import EXIT_FAILURE, EXIT_STORE, STORE_STATUS, OneLineParser
from .settings import (
    DEFAULT_ADMIN_PORT,
    DEFAULT_PORT,
    SOCKET_NAME,
    ServeSettings,
    add_options,
    admin_endpoint,
    bytes_of,
    flag_of,
    listen_texts,
    load_settings,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

EPILOG = f"""\
exit status:
  0    served, and drained after SIGTERM or SIGINT
  1    failed: a port in use, a device that broke; or a worker was down in the end
  2    bad usage: one line on standard error names every option that is wrong
{STORE_STATUS}
  130  a second SIGINT cut the drain short (143: a second SIGTERM)

When clients can connect, one line is written to standard output:
  ready ENDPOINT [ENDPOINT...]
"""

#: What a configuration calls what the command line calls otherwise.
_OPTIONS = {
    "listen": "--listen",
    "tls": "--tls-certificate and --tls-key",
    "capacity_bytes": "--capacity",
    "certificate_file": "--tls-certificate",
    "key_file": "--tls-key",
    "client_ca_file": "--tls-client-ca",
}


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `serve`."""
    serve = commands.add_parser(
        "serve",
        help="serve a data directory until SIGTERM or SIGINT",
        description="Serve a data directory until SIGTERM or SIGINT. Sizes are like 512MiB or 100GiB.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.set_defaults(function=_serve)
    serve.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="TOML: options by name (max_object for --max-object); flags win",
    )
    add_options(serve)
    # What a worker is told by its parent.
    serve.add_argument("--worker", type=_assignment, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _assignment(text: str) -> Assignment:
    try:
        return Assignment.from_text(text)
    except (ValueError, TypeError, KeyError) as exc:
        raise argparse.ArgumentTypeError(f"not what a parent tells a worker: {exc}") from None


def _serve(options: argparse.Namespace, parser: OneLineParser) -> int:
    ours = ("command", "function", "arguments", "worker")
    flags = {name: value for name, value in vars(options).items() if name not in ours}
    assignment: Assignment | None = getattr(options, "worker", None)
    try:
        settings = load_settings(flags, flags.pop("config", None))
        config, secret_files = gateway_config(settings)
    except ConfigError as exc:
        parser.error("; ".join(exc.problems))
    logs.configure("json" if settings.log_format == "json" else "text")
    if assignment is None:  # else the parent has said it
        for path in filter(is_readable_by_all, secret_files):
            log.warning("every user of this machine can read the token in %s", path)
        warn_of_open_doors(config)
    try:
        if assignment is not None:
            return anyio.run(serve_until_signal, assignment.config(config), assignment)
        if settings.workers > 1:
            return anyio.run(supervise, config, settings.workers, options.arguments)
        return anyio.run(serve_until_signal, config)
    except* (OSError, StorageError) as group:
        # Alone or in a group: the first is the reason, the rest its consequences.
        reason: BaseException = group
        while isinstance(reason, BaseExceptionGroup):
            reason = reason.exceptions[0]
        event = "directory_unusable" if isinstance(reason, StorageError) else "failed"
        text = re.sub(r"^\[Errno -?\d+\] ", "", str(reason))
        log.error("%s", text, extra={"data": {"event": event}})
    return EXIT_STORE if isinstance(reason, StorageError) else EXIT_FAILURE


def gateway_config(settings: ServeSettings) -> tuple[GatewayConfig, tuple[Path, ...]]:
    """The configuration, and the files that tokens were read from. Raises ConfigError: all that is wrong."""
    problems: list[str] = []

    def tried(name: str, function: Callable[[], T], otherwise: T) -> T:
        try:
            return function()
        except ConfigError as exc:
            problems.extend(f"argument {flag_of(name)}: {problem}" for problem in exc.problems)
        except (ValueError, TypeError, TLSFailure) as exc:
            problems.append(_with_options(exc, f"argument {flag_of(name)}: " if name else ""))
        return otherwise

    data = Path(settings.data).absolute()
    nowhere: tuple[Endpoint, ...] = ()
    listen = tried("", lambda: _listen(settings, data), nowhere)
    token: bytes | None = None
    tenants: tuple[Tenant, ...] = ()
    files: tuple[Path, ...] = ()
    if settings.token_file is not None:
        files = (Path(settings.token_file),)
        token = tried("token_file", lambda: read_token(files[0]), None)
    elif settings.tenants is not None:
        path = Path(settings.tenants)
        tenants, files = tried("tenants", lambda: load_tenants(path), (tenants, files))
    tls = tried("", lambda: _tls(settings), None)
    admin = _admin(settings)
    if admin is not None and is_reachable(admin) and not settings.insecure_admin:
        problems.append(
            f"argument --admin: everybody who reaches {admin} could read it: say --insecure-admin if they may"
        )
    if problems:
        raise ConfigError(tuple(problems))

    def made() -> GatewayConfig:
        return GatewayConfig(
            store=StoreConfig(
                directory=data,
                capacity_bytes=None if settings.capacity is None else bytes_of(settings.capacity),
                segment_bytes=None if settings.segment is None else bytes_of(settings.segment),
                max_command_bytes=bytes_of(settings.max_command),
                max_object_bytes=bytes_of(settings.max_object),
                durability="durable" if settings.durability == "durable" else "relaxed",
                io_threads=settings.io_threads,
                io_seconds=settings.io_seconds,
                io=settings.io,  # type: ignore[arg-type]  # one of the three, as the settings know
                accounts=tuple(tenant.account for tenant in tenants),
            ),
            listen=listen,
            admin=admin,
            tls=tls,
            token=token,
            tenants=tenants,
            grace_seconds=settings.grace,
            max_sessions=settings.max_connections,
            incoming_bytes=bytes_of(settings.incoming_memory),
        )

    config = tried("", made, None)
    if config is not None and not settings.insecure_no_token:
        problems += [
            f"argument --listen: everybody who reaches {endpoint} could use it: "
            "give --token-file, --tenants or --tls-client-ca, or say --insecure-no-token"
            for endpoint in open_doors(config)
        ]
    if config is not None and settings.workers > 1:
        whole = config
        tried("workers", lambda: check_shares(whole, settings.workers), None)
    if config is None or problems:
        raise ConfigError(tuple(problems))
    return config, files


def _listen(settings: ServeSettings, data: Path) -> tuple[Endpoint, ...]:
    if settings.listen is not None:
        return tuple(dict.fromkeys(parse_endpoint(text) for text in listen_texts(settings.listen)))
    try:
        local = parse_endpoint(f"unix://{data / SOCKET_NAME}")
    except ValueError as exc:
        raise ValueError(f"--data is too long for the default --listen: {exc}") from None
    return (TCPEndpoint(host="127.0.0.1", port=DEFAULT_PORT), local)


def _admin(settings: ServeSettings) -> Endpoint | None:
    """A second gateway of a machine is told where to listen, and must not fail for a port not asked for."""
    if settings.admin is not None:
        return admin_endpoint(settings.admin)
    return TCPEndpoint(host="127.0.0.1", port=DEFAULT_ADMIN_PORT) if settings.listen is None else None


def _tls(settings: ServeSettings) -> ssl.SSLContext | None:
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None and key is None and settings.tls_client_ca is None:
        return None
    if certificate is None or key is None:
        raise ValueError("'certificate_file' and 'key_file' go together")
    return server_context(certificate_file=certificate, key_file=key, client_ca_file=settings.tls_client_ca)


def _with_options(exc: Exception, prefix: str) -> str:
    """The problem in the words of the command line."""
    text = str(exc.args[0] if exc.args else exc)
    return prefix + re.sub(r"'(\w+)'", lambda found: _OPTIONS.get(found[1], found[0]), text, count=2)


def warn_of_open_doors(config: GatewayConfig) -> None:
    """Lines about who could come in, or listen in."""
    for endpoint in open_doors(config):
        log.warning("%s is open to everyone who reaches it: there is no token", endpoint)
    if config.token is not None or config.tenants:
        for endpoint in config.listen:
            if isinstance(endpoint, TCPEndpoint) and is_reachable(endpoint):
                log.warning("%s: the token and the objects travel in the clear: tls:// encrypts", endpoint)
    if config.admin is not None and is_reachable(config.admin):
        log.warning("the admin port %s is open to everyone who reaches it", config.admin)


def open_doors(config: GatewayConfig) -> list[Endpoint]:
    """Where somebody on another machine could come in without showing anything."""
    if config.token is not None or config.tenants:
        return []
    has_certificates = config.tls is not None and config.tls.verify_mode is ssl.CERT_REQUIRED
    return [
        endpoint
        for endpoint in config.listen
        if is_reachable(endpoint) and not (has_certificates and isinstance(endpoint, TLSEndpoint))
    ]


def is_reachable(endpoint: Endpoint) -> bool:
    """Whether somebody on another machine could connect."""
    if isinstance(endpoint, UnixEndpoint) or endpoint.host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(endpoint.host).is_loopback
    except ValueError:
        return True  # a name, of whatever
