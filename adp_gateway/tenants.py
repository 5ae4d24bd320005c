"""Who may come in, and what each of them sees: tenants, their tokens, and their part of the store.

A tenant's namespaces are kept under other names: eight bytes that say whose they are, then a hash of the
tenant's name and the namespace. So whatever a client asks for, it can only ever meet its own tenant's
objects, and a namespace of somebody else's is to it what an unused one is, down to the path that the question
takes.
"""

import hashlib
import hmac
import re
import stat
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from adp_client.protocol.errors import ConfigError
from adp_client.structuring import structure

from .sizes import size_of
from .store.quotas import PREFIX_BYTES, Account

MAX_TOKEN_BYTES = 4096
_DOMAIN = b"adp/1 tenant\0"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@attrs.frozen(kw_only=True)
class Tenant:
    """Somebody who has a token. `token_digest`: its SHA-256."""

    name: str
    token_digest: bytes = attrs.field(repr=False)
    quota_bytes: int | None = None

    @property
    def account(self) -> Account:
        """The same for a store."""
        return Account(name=self.name, prefix=self._hash()[:PREFIX_BYTES], quota_bytes=self.quota_bytes)

    def stored(self, namespace: bytes) -> bytes:
        """The name under which the store has this tenant's `namespace`."""
        return self._hash()[:PREFIX_BYTES] + self._hash(b"\0", namespace)[: len(namespace) - PREFIX_BYTES]

    def _hash(self, *parts: bytes) -> bytes:
        return hashlib.sha256(b"".join((_DOMAIN, self.name.encode(), *parts))).digest()


@attrs.frozen
class Anybody(Tenant):
    """Whoever connects where there are no tenants: namespaces are stored as they are."""

    name: str = attrs.field(default="", init=False)
    token_digest: bytes = attrs.field(default=b"", repr=False, init=False)

    def stored(self, namespace: bytes) -> bytes:
        """As it is."""
        return namespace


class Door:
    """Knows everybody's token. Without tenants, one token for all, or none."""

    def __init__(self, *, token: bytes | None = None, tenants: Iterable[Tenant] = ()) -> None:
        self._known = [(tenant.token_digest, tenant) for tenant in tenants]
        if token is not None:
            self._known.append((digest_of(token), Anybody()))
        self._is_open = not self._known

    def admit(self, token: bytes) -> Tenant | None:
        """Whose token this is; None if nobody's. Takes as long for every token of a length.

        What is compared is hashes, so neither the length of a token nor how far a guess is right shows; and
        all of them are compared, so neither does whose it is.
        """
        if self._is_open:
            return Anybody()
        shown = digest_of(token)
        found: Tenant | None = None
        for digest, tenant in self._known:
            if hmac.compare_digest(shown, digest):
                found = tenant
        return found


def digest_of(token: bytes) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(token).digest()


def read_token(path: Path) -> bytes:
    """The token in a file, without the white space around it. Raises ValueError."""
    try:
        token = path.read_bytes().strip()
    except OSError as exc:
        raise ValueError(f"cannot read {str(path)!r}: {exc.strerror}") from None
    if not 1 <= len(token) <= MAX_TOKEN_BYTES:
        raise ValueError(f"{str(path)!r} must hold a token of 1 to {MAX_TOKEN_BYTES} bytes")
    return token


def is_readable_by_all(path: Path) -> bool:
    """Whether every user of the machine can read a file."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


# The file


def _quota(_instance: object, _attribute: object, value: Any) -> None:
    if value is not None and _bytes(value) < 1:
        raise ValueError("a quota is at least 1 byte: leave it out for as much as there is")


def _bytes(value: Any) -> int:
    if type(value) is int:
        return value
    if type(value) is str:
        return size_of(value)
    raise ValueError(f"expected a size, as in 100GiB, not {value!r}")


def _digest(_instance: object, _attribute: object, value: str | None) -> None:
    if value is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise ValueError("expected 64 hexadecimal digits")


@attrs.frozen(kw_only=True)
class TenantSettings:
    """One table of the file."""

    token_file: str | None = None
    token_sha256: str | None = attrs.field(default=None, validator=_digest, repr=False)
    quota: Any = attrs.field(default=None, validator=_quota)

    def problems(self) -> list[str]:
        """What is wrong between fields."""
        if (self.token_file is None) == (self.token_sha256 is None):
            return ["expected token_file or token_sha256, one of the two"]
        return []


@attrs.frozen(kw_only=True)
class TenantsFile:
    """The whole file."""

    tenants: dict[str, TenantSettings]

    def problems(self) -> list[str]:
        """What is wrong between tenants."""
        return [] if self.tenants else ["expected at least one table [tenants.NAME]"]


def load_tenants(path: Path) -> tuple[tuple[Tenant, ...], tuple[Path, ...]]:
    """The tenants that a TOML file names, and the files that their tokens were read from.

    Token files are looked for beside the file. The file itself holds no secret that could be used as it is.

    Raises:
        ConfigError: everything that is wrong with it, each with the path of the key.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError((f"cannot read {str(path)!r}: {exc.strerror}",)) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError((f"{str(path)!r} is not TOML: {exc}",)) from None
    settings = structure(raw, TenantsFile)
    problems: list[str] = []
    tenants: list[Tenant] = []
    files: list[Path] = []
    for name, found in settings.tenants.items():
        where = f"$.tenants[{name!r}]"
        if not _NAME.fullmatch(name):
            problems.append(f"a name is up to 64 letters, digits and ._- @ {where}")
        if found.token_file is not None:
            files.append(path.parent / found.token_file)
            try:
                digest = digest_of(read_token(files[-1]))
            except ValueError as exc:
                problems.append(f"{exc} @ {where}.token_file")
                continue
        else:
            digest = bytes.fromhex(found.token_sha256 or "")
        for other in tenants:
            if other.token_digest == digest:
                problems.append(f"the token is {other.name}'s, too @ {where}")
        quota_bytes = None if found.quota is None else _bytes(found.quota)
        tenants.append(Tenant(name=name, token_digest=digest, quota_bytes=quota_bytes))
    if problems:
        raise ConfigError(tuple(problems))
    return tuple(tenants), tuple(files)
