"""What `serve` can be told, by flags and by a file: one class says what there is, its types and its limits.

A field is the flag of its name (`max_object`: `--max-object`) and the key of its name in the file. Flags win.
"""

import argparse
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from adp_client.protocol.constants import MAX_WORKERS
from adp_client.protocol.errors import ConfigError
from adp_client.structuring import structure
from adp_client.transport import TLSEndpoint, parse_endpoint
from adp_client.transport.endpoints import Endpoint
from adp_gateway.config import GatewayConfig, StoreConfig
from adp_gateway.sizes import size_of

DEFAULT_PORT = 7171
DEFAULT_ADMIN_PORT = 7172
SOCKET_NAME = "gateway.sock"

Validator = Callable[[Any, Any, Any], None]


def bytes_of(value: Any) -> int:
    """`512MiB` or a number of bytes. Raises ValueError."""
    if type(value) is int:
        return value
    if type(value) is str:
        return size_of(value)
    raise ValueError(f"expected a size, as in 100GiB, not {value!r}")


def admin_endpoint(text: str) -> Endpoint | None:
    """HOST:PORT, tcp://HOST:PORT or unix:///PATH; None for `none`. Raises ValueError."""
    if text == "none":
        return None
    if "://" not in text and ":" not in text:
        raise ValueError(f"{text!r} is none of HOST:PORT, unix:///PATH and none")
    endpoint = parse_endpoint(text if "://" in text else f"tcp://{text}")
    if isinstance(endpoint, TLSEndpoint):
        raise ValueError("the admin port speaks no TLS: put a proxy before it")
    return endpoint


def _like(config: type, name: str) -> Validator:
    """The limits of a field of a configuration, for the option that it comes from."""
    field = attrs.fields_dict(config)[name]

    def check(_instance: object, _attribute: object, value: Any) -> None:
        if value is None:
            return
        if type(field.default) is int or name.endswith("_bytes"):
            value = bytes_of(value)
        try:
            if field.validator is not None:
                field.validator(None, field, value)
        except (ValueError, TypeError) as exc:
            raise ValueError(str(exc.args[0]).removeprefix(f"'{name}' ")) from None

    return check


def _listen(_instance: object, _attribute: object, value: Any) -> None:
    if value is None:
        return
    texts = listen_texts(value)
    if not texts:
        raise ValueError("at least one endpoint")
    for text in texts:
        parse_endpoint(text)


def listen_texts(value: Any) -> list[str]:
    """One endpoint or several, as texts. Raises ValueError."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected an endpoint or a list of them, not {value!r}")
    return texts


def _admin(_instance: object, _attribute: object, value: str | None) -> None:
    if value is not None:
        admin_endpoint(value)


def _workers(_instance: object, _attribute: object, value: int) -> None:
    if not 1 <= value <= MAX_WORKERS:
        raise ValueError(f"must be between 1 and {MAX_WORKERS}: {value}")


def _one_of(*choices: str) -> Validator:
    def check(_instance: object, _attribute: object, value: str) -> None:
        if value not in choices:
            raise ValueError(f"expected {' or '.join(choices)}, not {value!r}")

    return check


def _option(default: Any, help: str, metavar: str | None = None, validator: Any = None, **more: Any) -> Any:
    metadata = {"help": help, "metavar": metavar, **more}
    return attrs.field(default=default, validator=validator, metadata=metadata)


def _path(help: str, default: Any = None, metavar: str = "FILE") -> Any:
    return _option(default, help, metavar, is_path=True)


def _size(default: Any, help: str, config: type, name: str) -> Any:
    return _option(default, help, "SIZE", _like(config, name))


@attrs.frozen(kw_only=True)
class ServeSettings:
    """The options of `serve`. Sizes are numbers of bytes, or texts like 100GiB."""

    data: str = _path("where the objects are; made if absent", attrs.NOTHING, "DIR")
    listen: Any = _option(
        None,
        "tcp://HOST:PORT, tls://HOST:PORT or unix:///PATH; may be given more than once (default: "
        f"tcp://127.0.0.1:{DEFAULT_PORT} and unix://DIR/{SOCKET_NAME})",
        "ENDPOINT",
        _listen,
        action="append",
    )
    admin: str | None = _option(
        None,
        "HOST:PORT or unix:///PATH where /healthz and /metrics are, or none (default: "
        f"127.0.0.1:{DEFAULT_ADMIN_PORT}, and none if --listen is given)",
        "ENDPOINT",
        _admin,
    )
    capacity: Any = _size(
        None,
        "hard limit on disk: objects, journals and reserves together (default: 80%% of what is free)",
        StoreConfig,
        "capacity_bytes",
    )
    token_file: str | None = _path("clients must show the token in this file")
    tenants: str | None = _path(
        "TOML: a token, and a quota if you like, for each tenant; none sees another's objects"
    )
    insecure_no_token: bool = _option(False, "listen beyond this machine for everybody who can reach it")
    insecure_admin: bool = _option(False, "let everybody who can reach it read the admin port")
    tls_certificate: str | None = _path("PEM, for tls://: this gateway's certificate and its chain")
    tls_key: str | None = _path("PEM: the private key of the certificate")
    tls_client_ca: str | None = _path("PEM: clients on tls:// must show a certificate of these")
    durability: str = _option(
        "relaxed",
        "what an acknowledged object survives: the death of the process, or a power cut too",
        validator=_one_of("relaxed", "durable"),
        choices=("relaxed", "durable"),
    )
    max_object: Any = _size("64MiB", "largest object", StoreConfig, "max_object_bytes")
    max_command: Any = _size(
        "256KiB",
        "longest command for the device; larger objects are cut",
        StoreConfig,
        "max_command_bytes",
    )
    segment: Any = _size(
        None, "what is evicted as a unit (default: by capacity)", StoreConfig, "segment_bytes"
    )
    io_threads: int = _option(8, "for reads, and as many for writes", "N", _like(StoreConfig, "io_threads"))
    io_seconds: float = _option(
        10.0,
        "for a read to get a thread, and then an answer of the device",
        "SECONDS",
        _like(StoreConfig, "io_seconds"),
    )
    io: str = _option(
        "auto",
        "around the page cache, through it, or the first where the file system takes it",
        validator=_one_of("auto", "direct", "buffered"),
        choices=("auto", "direct", "buffered"),
    )
    incoming_memory: Any = _size(
        "512MiB", "memory for objects on their way in", GatewayConfig, "incoming_bytes"
    )
    workers: int = _option(
        1,
        "processes, each of which keeps a part of the objects; fixed when DIR is made",
        "N",
        _workers,
    )
    max_connections: int = _option(1024, "at a time", "N", _like(GatewayConfig, "max_sessions"))
    grace: float = _option(10.0, "for clients to leave", "SECONDS", _like(GatewayConfig, "grace_seconds"))
    log_format: str = _option(
        "text",
        "for people, or one JSON object a line",
        validator=_one_of("text", "json"),
        choices=("text", "json"),
    )

    def problems(self) -> list[str]:
        """What is wrong between options."""
        if self.token_file is not None and self.tenants is not None:
            return ["token_file is for everybody, tenants have their own: one of the two"]
        return []


def add_options(parser: argparse.ArgumentParser) -> None:
    """A flag for each field. None has a default here: what was not given is left to the file."""
    who = parser.add_mutually_exclusive_group()
    for field in attrs.fields(ServeSettings):
        about = dict(field.metadata)
        about.pop("is_path", None)
        if field.default not in (None, False, attrs.NOTHING):
            about["help"] += f" (default: {field.default})"
        group = who if field.name in ("token_file", "tenants") else parser
        if field.type is bool:
            del about["metavar"]
            about["action"] = "store_true"
        elif field.type in (int, float):
            about["type"] = field.type
        group.add_argument(flag_of(field.name), default=argparse.SUPPRESS, **about)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def load_settings(flags: Mapping[str, Any], file: Path | None) -> ServeSettings:
    """The settings of a file, if there is one, with the flags that were given over them.

    Paths in the file start where the file is. Raises ConfigError with everything that is wrong: what flags
    say in their names, what the file says with the path of the key.
    """
    told = {} if file is None else _read(file)
    fields = attrs.fields_dict(ServeSettings)
    if file is not None:
        for name, value in told.items():
            if name in fields and fields[name].metadata.get("is_path") and isinstance(value, str):
                told[name] = str(file.parent / value)
    try:
        return structure({**told, **flags}, ServeSettings)
    except ConfigError as exc:
        problems = (_named(problem, flags, told, file) for problem in exc.problems)
        raise ConfigError(tuple(problems)) from None


def _named(problem: str, flags: Mapping[str, Any], told: Mapping[str, Any], file: Path | None) -> str:
    text, _, name = problem.rpartition(" @ $.")
    if name in flags or (text and name not in told):
        return f"argument {flag_of(name)}: {text}"
    return problem if file is None else f"{file}: {problem.removesuffix(' @ $')}"


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError((f"argument --config: cannot read {str(file)!r}: {exc.strerror}",)) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError((f"argument --config: {str(file)!r} is not TOML: {exc}",)) from None
