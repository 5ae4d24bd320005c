"""Where a gateway listens: `tcp://HOST:PORT`, `tls://HOST:PORT` or `unix:///absolute/path`."""

import re
from typing import TypeAlias

import attrs


@attrs.frozen(kw_only=True)
class TCPEndpoint:
    """A host (name, IPv4, or IPv6 without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


@attrs.frozen(kw_only=True)
class TLSEndpoint:
    """The same with TLS. Not a kind of TCPEndpoint: who takes one for the other would speak in the clear."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tls://{host}:{self.port}"


@attrs.frozen(kw_only=True)
class UnixEndpoint:
    """The path of a Unix socket."""

    path: str

    def __str__(self) -> str:
        return f"unix://{self.path}"


Endpoint: TypeAlias = TCPEndpoint | TLSEndpoint | UnixEndpoint

MAX_UNIX_PATH_BYTES = 107  # sockaddr_un.sun_path, less the closing zero
_HOST = re.compile(r"[!-Z\\^-~]+")  # ASCII that can be seen, but no brackets
_PORT = re.compile(r"[0-9]{1,5}")


def parse_endpoint(text: str) -> Endpoint:
    """The endpoint that `text` names. Raises ValueError with a sentence that says what is wrong."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("tcp", "tls", "unix"):
        raise ValueError(f"{text!r} is none of tcp://HOST:PORT, tls://HOST:PORT and unix:///PATH")
    if scheme == "unix":
        if not rest.startswith("/"):
            raise ValueError(f"{text!r}: the path of a Unix socket must be absolute (unix:///PATH)")
        if "\0" in rest or not 0 < _path_bytes(rest) <= MAX_UNIX_PATH_BYTES:
            raise ValueError(f"{text!r}: a Unix socket's path is text of at most {MAX_UNIX_PATH_BYTES} bytes")
        return UnixEndpoint(path=rest)
    if "@" in rest:
        raise ValueError(f"an endpoint has no user and password: {scheme}://HOST:PORT")  # and none is shown
    host, colon, port = rest.rpartition(":")
    if not colon or port.endswith("]"):
        raise ValueError(f"{text!r}: no port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets")
    if not host:
        raise ValueError(f"{text!r}: no host")
    if not _HOST.fullmatch(host):
        raise ValueError(
            f"{text!r}: a host has no spaces and no brackets, and other letters than ASCII as xn--"
        )
    if not _PORT.fullmatch(port) or int(port) > 65535:
        raise ValueError(f"{text!r}: the port must be a number from 0 to 65535")
    if scheme == "tls":
        return TLSEndpoint(host=host, port=int(port))
    return TCPEndpoint(host=host, port=int(port))


def _path_bytes(path: str) -> int:
    """Its length as the system sees it; 0 if it is no text that can be a path."""
    try:
        return len(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return 0
