"""The settings of the engine adapters: what stands under `"adp"` in the engine's own configuration."""

import attrs
from attrs import validators

from adp_client.config import TLSConfig, tls_problems
from adp_client.protocol.errors import ConfigError
from adp_client.structuring import structure
from adp_client.transport.endpoints import UnixEndpoint, parse_endpoint

_MIB = 1 << 20


def _endpoint(_instance: object, _attribute: object, value: str) -> None:
    endpoint = parse_endpoint(value)
    if not isinstance(endpoint, UnixEndpoint) and endpoint.port == 0:
        raise ValueError(f"{value!r}: nobody can be reached on port 0")


@attrs.frozen(kw_only=True)
class OffloadingConfig:
    """Settings of the offloading adapter. All have defaults; an empty `"adp"` is valid."""

    #: Where the gateway listens: `tcp://HOST:PORT`, `tls://HOST:PORT` or `unix:///abs/path`.
    endpoint: str = attrs.field(default="tcp://127.0.0.1:7171", validator=_endpoint)
    #: Shown to the gateway, if it asks for one.
    token: str | None = attrs.field(default=None, repr=False)
    #: Certificates, for `tls://`.
    tls: TLSConfig | None = None
    #: Names the model and its weights instead of the fingerprint of its files.
    model_id: str | None = attrs.field(
        default=None,
        validator=validators.optional(validators.and_(validators.min_len(1), validators.max_len(4096))),
    )
    #: Memory of the scheduler process where restored objects wait for the engine, in bytes.
    staging_bytes: int = attrs.field(default=1024 * _MIB, validator=validators.ge(4096))
    #: Memory of each worker process where objects wait for the network, in bytes.
    store_staging_bytes: int = attrs.field(default=256 * _MIB, validator=validators.ge(4096))
    #: How long a request may wait for the answer whether its prefix is stored.
    lookup_seconds: float = attrs.field(default=1.0, validator=[validators.gt(0), validators.le(3600)])
    #: How long a request may wait for the bytes of its prefix.
    load_seconds: float = attrs.field(default=10.0, validator=[validators.gt(0), validators.le(3600)])
    #: How long a store may take before it is given up.
    store_seconds: float = attrs.field(default=10.0, validator=[validators.gt(0), validators.le(3600)])
    #: How long "not stored" is believed without asking again. Not less than some scheduling steps, or a
    #: request could find one answer out of date whenever it has got the others.
    absent_seconds: float = attrs.field(default=2.0, validator=[validators.ge(0.1), validators.le(3600)])

    def problems(self) -> list[str]:
        """What is wrong between fields."""
        return tls_problems(self.endpoint, self.tls)


def structure_offloading(raw: object, *, path: str = "$.adp") -> OffloadingConfig:
    """Turn what the user wrote under `path` into settings.

    Raises ConfigError with every problem at once, each as `"text @ $.path"`: an unknown key (and what is
    allowed), a value of another type (`"4096"` is no number, `true` is no integer), a value out of bounds.
    """
    try:
        return structure(raw, OffloadingConfig)
    except ConfigError as error:
        raise ConfigError(tuple(_below(path, problem) for problem in error.problems)) from None


def _below(path: str, problem: str) -> str:
    text, _, inner = problem.rpartition("@ $")
    return f"{text}@ {path}{inner}"
