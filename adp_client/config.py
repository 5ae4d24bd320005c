"""How a client is set up. Frozen, checked at construction; `structuring.structure` makes it from data.

Either way, a value that cannot be used is a ConfigError: by hand the first, of data all of them at once.
"""

from collections.abc import Callable
from typing import Any

import attrs
from attrs import validators

from .protocol.errors import ConfigError
from .transport.endpoints import TLSEndpoint, parse_endpoint
from .transport.trust import TLSConfig as TLSConfig

MAX_TOKEN_BYTES = 32 << 10  # it must fit into the handshake, whose body has at most 64 KiB


# A config made by hand is checked like one made of data: `structuring` calls the validators too, without an
# instance.


def _number(_instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    if type(value) not in (int, float):
        raise ConfigError((f"{attribute.name} must be a number, not {value!r}",))


def _within(*bounds: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """A number within `bounds`, which are validators of attrs, but with a ConfigError."""

    def check(instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
        _number(instance, attribute, value)
        try:
            for bound in bounds:
                bound(instance, attribute, value)
        except ValueError as exc:
            raise ConfigError((str(exc).replace(f"'{attribute.name}'", attribute.name, 1),)) from None

    return check


def _is_a(kind: type, name: str) -> Callable[[Any, Any, Any], None]:
    def check(_instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
        if not isinstance(value, kind):
            raise ConfigError((f"{attribute.name} must be {name}, not {type(value).__name__}",))

    return check


def _positive(default: float) -> Any:
    return attrs.field(default=default, validator=_within(validators.gt(0), validators.le(86400)))


@attrs.frozen(kw_only=True)
class Timeouts:
    """Limits in seconds, each for one thing."""

    #: Dial and handshake together, one attempt.
    connect_seconds: float = _positive(5.0)
    #: EXIST, from the call to its answer, queueing included. When it passes and the request has been sent,
    #: the connection is given up and opened anew.
    exist_seconds: float = _positive(2.0)
    #: Any other verb, in the same way; waiting for a connection counts too.
    request_seconds: float = _positive(30.0)
    #: A connection that has said nothing for so long is pinged, and has as long again to answer.
    idle_ping_seconds: float = _positive(10.0)
    #: How long a cancelled verb waits for a transfer that is inside its memory before the connection is cut.
    release_seconds: float = _positive(2.0)
    #: How long closing the client waits for the gateway's last answers.
    goodbye_seconds: float = _positive(1.0)


@attrs.frozen(kw_only=True)
class BackoffConfig:
    """Time between attempts to connect: `initial * factor**n`, at most `cap`, then jitter.

    The jitter comes after the cap, so that clients that have all reached it do not fall into step: the
    delay is drawn from `[(1 - jitter) * d, d]`.
    """

    initial_seconds: float = _positive(0.05)
    factor: float = attrs.field(default=2.0, validator=_within(validators.ge(1), validators.le(100)))
    cap_seconds: float = _positive(5.0)
    jitter: float = attrs.field(default=1.0, validator=_within(validators.ge(0), validators.le(1)))

    def problems(self) -> list[str]:
        """What is wrong between fields."""
        if self.cap_seconds < self.initial_seconds:
            return ["cap_seconds is less than initial_seconds"]
        return []

    def __attrs_post_init__(self) -> None:
        if problems := self.problems():
            raise ConfigError(tuple(problems))


def _endpoint(_instance: object, _attribute: object, value: Any) -> None:
    if not isinstance(value, str):
        raise ConfigError((f"endpoint must be text, not {value!r}",))
    try:
        parse_endpoint(value)
    except ValueError as exc:
        raise ConfigError((str(exc),)) from None


def _token(_instance: object, _attribute: object, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise ConfigError((f"token must be text or None, not {type(value).__name__}",))  # it may be a secret
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise ConfigError(("token must be text that can be sent as UTF-8",)) from None
    if size_bytes > MAX_TOKEN_BYTES:
        raise ConfigError((f"token must have at most {MAX_TOKEN_BYTES} bytes",))


@attrs.frozen(kw_only=True)
class ClientConfig:
    """One gateway, and how to treat it."""

    #: `tcp://HOST:PORT`, `tls://HOST:PORT` or `unix:///absolute/path`.
    endpoint: str = attrs.field(validator=_endpoint)
    #: Shown to the gateway in the handshake; kept out of repr and logs.
    token: str | None = attrs.field(default=None, repr=False, validator=_token)
    #: For `tls://`. None: the authorities that the system trusts, and no certificate of the client's own.
    tls: TLSConfig | None = attrs.field(
        default=None, validator=validators.optional(_is_a(TLSConfig, "a TLSConfig or None"))
    )
    timeouts: Timeouts = attrs.field(factory=Timeouts, validator=_is_a(Timeouts, "a Timeouts"))
    backoff: BackoffConfig = attrs.field(
        factory=BackoffConfig, validator=_is_a(BackoffConfig, "a BackoffConfig")
    )
    #: Check the XXH3-64 of every object that was read. A mismatch is a CORRUPT item, never bytes.
    verify_payloads: bool = attrs.field(default=True, validator=_is_a(bool, "True or False"))

    def problems(self) -> list[str]:
        """What is wrong between fields."""
        return tls_problems(self.endpoint, self.tls)


def tls_problems(endpoint: str, tls: TLSConfig | None) -> list[str]:
    """Settings of TLS that would not be used: somebody believes that the connection is safe."""
    if tls is not None and not isinstance(parse_endpoint(endpoint), TLSEndpoint):
        return [f"tls is for endpoints tls://HOST:PORT; {endpoint!r} is not one"]
    return []
