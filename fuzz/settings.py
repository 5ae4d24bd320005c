"""Target `config`: whatever a user may have written, through the door for configuration."""

import json
import tomllib
from typing import Any

import attrs

from adp_client.config import ClientConfig
from adp_client.errors import ConfigError
from adp_client.structuring import structure
from adp_client.transport.endpoints import parse_endpoint
from adp_engines.config import OffloadingConfig, structure_offloading

#: A problem is for one person to read; a whole file in it is not.
MAX_TEXT_CHARACTERS = 5000


def config(data: bytes) -> None:
    """Settings and endpoints are accepted, or refused with a problem that says something; nothing else.

    The first byte says what the rest is: bit 0 JSON or TOML, the next two bits for whom. What was accepted
    is plain data that is accepted again, as the same.
    """
    if not data:
        return
    mode, rest = data[0], data[1:]
    whose = (mode >> 1) & 3
    if whose == 3:
        _endpoint(rest)
        return
    try:
        raw = tomllib.loads(rest.decode()) if mode & 1 else json.loads(rest)
    except (ValueError, RecursionError):
        return  # the reader of the format has refused it, before anything of ours
    if whose == 2:
        _round_trip(raw, OffloadingConfig, prefixed=True)
    else:
        _round_trip(raw, ClientConfig)


def _round_trip(raw: object, cls: type[Any], *, prefixed: bool = False) -> None:
    try:
        made = structure_offloading(raw) if prefixed else structure(raw, cls)
    except ConfigError as exc:
        problems = exc.problems
    else:
        assert structure(attrs.asdict(made), cls) == made
        return
    assert problems, "refused without a reason"
    for problem in problems:
        text, _, path = problem.rpartition(" @ $")
        assert text.strip(), f"a problem that says nothing: {problem!r}"
        assert not prefixed or path.startswith(".adp"), f"a path that leads elsewhere: {problem!r}"
        assert len(text) <= MAX_TEXT_CHARACTERS, f"a problem of {len(text)} characters"


def _endpoint(rest: bytes) -> None:
    try:
        text = rest.decode("utf-8", "surrogateescape")  # as the command line gives it
        endpoint = parse_endpoint(text)
    except ValueError as exc:
        refusal = exc
    else:
        assert parse_endpoint(str(endpoint)) == endpoint, f"{endpoint} is not what {text!r} was"
        return
    assert type(refusal) is ValueError, f"not a sentence for the user: {refusal!r}"
    assert str(refusal).strip()
