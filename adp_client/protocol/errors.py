"""The errors that a client can see, from the root down (section 6 of the spec for the codes).

Local or Remote says whose fault it was. A miss is not an error: `exist` and `read` answer in values.
"""

from .constants import ErrorCode


class ADPError(Exception):
    """Root of every error that ADP raises on purpose."""


class ConfigError(ADPError, ValueError):
    """Configuration that cannot be used. `problems` are sentences: for configuration that came as data all of
    them at once, each as `"text @ $.path"`; for one made by hand the first, without a path."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ProtocolError(ADPError):
    """Abstract: somebody broke the spec. `code` is what the other side would be told."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.MALFORMED) -> None:
        if type(self) is ProtocolError:
            raise TypeError("tried to directly instantiate ProtocolError")
        super().__init__(message)
        self.code = code


class LocalProtocolError(ProtocolError):
    """This side asked for something that the spec forbids. Nothing was sent; the connection is fine."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the spec. This epoch of the connection is over."""


class LinkError(ADPError):
    """The connection, not the request, is the trouble."""


class ConnectFailed(LinkError):
    """No connection within the verb's own time. `endpoint` says where to; `__cause__` keeps the reason."""

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(f"cannot reach {endpoint}: {reason}")
        self.endpoint = endpoint
        self.reason = reason


class LinkLost(LinkError):
    """The connection ended under a request that cannot be replayed safely.

    `maybe_applied` is false when nothing of the request had been sent.
    """

    def __init__(self, reason: str, *, epoch: int, maybe_applied: bool) -> None:
        super().__init__(f"connection lost (epoch {epoch}): {reason}")
        self.reason = reason
        self.epoch = epoch
        self.maybe_applied = maybe_applied


class LinkRefused(LinkError):
    """The peer ended the connection and said why (an ERROR frame): `code` and `text` are its words."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(f"the peer ended the connection: {code.name}: {text}")
        self.code = code
        self.text = text


class LinkClosed(LinkError):
    """You closed the client."""


class RequestTimeout(ADPError, TimeoutError):
    """The gateway did not answer within the verb's own deadline. The link is reopened if the request had
    been sent; one that was still waiting for room is withdrawn."""


class RequestError(ADPError):
    """The gateway refused a whole request; the link is healthy."""

    code: ErrorCode

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.code.name)


class ObjectNotFound(RequestError):
    """No such object."""

    code = ErrorCode.NOT_FOUND


class ObjectCorrupt(RequestError):
    """The bytes do not match their checksum; they were not handed out."""

    code = ErrorCode.CORRUPT


class CapacityExhausted(RequestError):
    """No room, and nothing that may be evicted."""

    code = ErrorCode.CAPACITY_EXHAUSTED


class Overloaded(RequestError):
    """Too much at once. Try again after `retry_after` seconds."""

    code = ErrorCode.OVERLOADED

    def __init__(self, message: str = "", *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StaleEpoch(RequestError):
    """The request named something (a lease, a region) of an earlier connection or boot."""

    code = ErrorCode.STALE_EPOCH


class Refused(RequestError):
    """Not allowed: token, namespace, quota, or a feature that was not agreed on."""

    code = ErrorCode.REFUSED


class GatewayFault(RequestError):
    """The gateway's own trouble, an I/O error for instance."""

    code = ErrorCode.GATEWAY_FAULT


class ObjectTooLarge(RequestError):
    """Above `max_object_bytes`, or above the memory offered for it."""

    code = ErrorCode.TOO_LARGE


#: Which exception stands for which request-level code; a bijection (a test walks it both ways).
REQUEST_ERRORS: dict[ErrorCode, type[RequestError]] = {
    cls.code: cls
    for cls in (
        ObjectNotFound,
        ObjectCorrupt,
        CapacityExhausted,
        Overloaded,
        StaleEpoch,
        Refused,
        GatewayFault,
        ObjectTooLarge,
    )
}


def request_error(code: ErrorCode, *, retry_after_ms: int = 0) -> RequestError:
    """The exception for a request that was answered with `code` (which must not be OK)."""
    if code is ErrorCode.OVERLOADED:
        return Overloaded(retry_after=retry_after_ms / 1000)
    return REQUEST_ERRORS[code]()
