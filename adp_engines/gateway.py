"""What the adapters ask of a client, and how they make one from their settings."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from .config import OffloadingConfig


class Statuses(Protocol):
    """An answer with one status byte an item: 0 is yes."""

    @property
    def statuses(self) -> bytes: ...


class ReadAnswer(Statuses, Protocol):
    """The answer to a read also says how long each object was, in bytes."""

    @property
    def lengths(self) -> Sequence[int]: ...


class GatewayClient(Protocol):
    """The part of `adp_client.Client` that the adapters use."""

    @property
    def is_connected(self) -> bool: ...

    async def exist(self, namespace: bytes, keys: Sequence[bytes], /) -> Statuses: ...

    async def read(
        self, namespace: bytes, keys: Sequence[bytes], buffers: Sequence[memoryview], /
    ) -> ReadAnswer: ...

    async def write(
        self, namespace: bytes, keys: Sequence[bytes], payloads: Sequence[memoryview], /
    ) -> Statuses: ...

    async def ping(self) -> object: ...


ClientFactory = Callable[[], AbstractAsyncContextManager[GatewayClient]]


def client_factory(config: OffloadingConfig) -> ClientFactory:
    """A factory of clients for the gateway in `config`; to be called in the thread whose loop will run the
    client."""

    # Not at the top: settings can be checked, and the adapters tested, without the client's event loop
    # libraries. Not in the thread either: it would import while the engine's start keeps the processor busy.
    import adp_client

    def connect() -> AbstractAsyncContextManager[GatewayClient]:
        return adp_client.Client(
            adp_client.ClientConfig(
                endpoint=config.endpoint,
                token=config.token,
                tls=config.tls,
                timeouts=adp_client.Timeouts(
                    exist_seconds=config.lookup_seconds,
                    request_seconds=max(config.load_seconds, config.store_seconds),
                ),
            )
        )

    return connect
