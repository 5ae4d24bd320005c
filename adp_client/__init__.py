"""Client of ADP, the KV-cache gateway for LLM engines. Runs on asyncio and on trio.

Errors are in `adp_client.errors`, the wire protocol in `adp_client.protocol`.
"""

from .client import Client as Client
from .config import BackoffConfig as BackoffConfig
from .config import ClientConfig as ClientConfig
from .config import Timeouts as Timeouts
from .config import TLSConfig as TLSConfig
from .leases import Lease as Lease
from .protocol.constants import ErrorCode as ErrorCode
from .protocol.keys import ObjectKey as ObjectKey
from .regions import RegionSlice as RegionSlice
from .regions import SharedRegion as SharedRegion
from .results import CheckResult as CheckResult
from .results import DeleteResult as DeleteResult
from .results import ExistResult as ExistResult
from .results import GatewayInfo as GatewayInfo
from .results import ReadResult as ReadResult
from .results import WriteResult as WriteResult
from .stats import ClientStats as ClientStats

__all__ = [
    "BackoffConfig",
    "CheckResult",
    "Client",
    "ClientConfig",
    "ClientStats",
    "DeleteResult",
    "ErrorCode",
    "ExistResult",
    "GatewayInfo",
    "Lease",
    "ObjectKey",
    "ReadResult",
    "RegionSlice",
    "SharedRegion",
    "TLSConfig",
    "Timeouts",
    "WriteResult",
]
