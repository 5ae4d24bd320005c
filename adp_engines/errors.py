"""What can go wrong between an engine and ADP, from the root down.

Nothing here is ever raised for the network's sake: towards the engine, trouble on the way to the gateway is a
miss or a dropped store plus a counter (ARCHITECTURE: engine-facing methods never raise for the network).
"""

from adp_client.protocol.errors import ADPError


class EngineError(ADPError):
    """Root of the errors of the engine adapters."""


class StartupRefused(EngineError, SystemExit):
    """The engine must not start like this; the message is the one line that says why.

    Also a `SystemExit` with status 2 (bad usage), and deliberately not a `ValueError`: engines build their
    configuration inside validators that turn any `ValueError` into a long report and carry on to status 1.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = 2

    def __str__(self) -> str:
        return f"adp: {self.reason}"


class UnsupportedEngine(StartupRefused):
    """The engine's version, or a feature that it was asked to use, is none that this adapter knows."""


class UnknownLayout(StartupRefused):
    """The engine described cache tensors that cannot be stored and restored whole; names the tensor."""


class StagingUnreachable(EngineError):
    """A staging region cannot be mapped, or its name now means another region."""


class BridgeClosed(EngineError):
    """The call was still under way when its bridge closed; the caller's memory is free again."""
