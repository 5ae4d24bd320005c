"""The settings of the engine adapters: what stands under `"adp"` in the engine's own configuration."""

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import validators

from adp_client.protocol.errors import ConfigError

_MIB = 1 << 20


def _endpoint(_instance: object, _attribute: object, value: str) -> None:
    tcp, _, unix = value.partition("unix://")
    if unix.startswith("/") and not tcp:
        return
    host, _, port = value.removeprefix("tcp://").rpartition(":")
    if not value.startswith("tcp://") or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{value!r} is neither tcp://HOST:PORT nor unix:///abs/path")


@attrs.frozen(kw_only=True)
class OffloadingConfig:
    """Settings of the offloading adapter. All have defaults; an empty `"adp"` is valid."""

    #: Where the gateway listens: `tcp://HOST:PORT` or `unix:///abs/path`.
    endpoint: str = attrs.field(default="tcp://127.0.0.1:7171", validator=_endpoint)
    #: Shown to the gateway, if it asks for one.
    token: str | None = attrs.field(default=None, repr=False)
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


def structure_offloading(raw: object, *, path: str = "$.adp") -> OffloadingConfig:
    """Turn what the user wrote under `path` into settings.

    Raises ConfigError with every problem at once, each as `"text @ $.path"`: an unknown key (with the known
    ones), a value of another type (`"false"` is no number, `true` is no integer), a value out of bounds.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError((f"expected an object, not {type(raw).__name__} @ {path}",))
    problems: list[str] = []
    values: dict[str, Any] = {}
    fields = attrs.fields_dict(OffloadingConfig)
    for key, value in raw.items():
        if key not in fields:
            problems.append(f"unknown key (allowed: {', '.join(sorted(fields))}) @ {path}.{key}")
            continue
        kind = fields[key].type
        if kind is float and type(value) is int:
            value = float(value)
        allowed: tuple[type, ...] = (str, type(None)) if kind == (str | None) else (kind,)  # type: ignore[assignment]
        if type(value) not in allowed:
            wanted = " or ".join(t.__name__.replace("NoneType", "null") for t in allowed)
            problems.append(f"expected {wanted}, not {type(value).__name__} @ {path}.{key}")
            continue
        try:
            attrs.evolve(OffloadingConfig(), **{key: value})
        except ValueError as error:
            problems.append(f"{error.args[0]} @ {path}.{key}")
        values[key] = value
    if problems:
        raise ConfigError(tuple(problems))
    return OffloadingConfig(**values)
