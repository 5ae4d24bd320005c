"""For tests of programs that use the client, and of gateways and clients that speak ADP/1.

A gateway in memory, broken networks, and the contracts: `check_gateway_contract`, `check_client_contract`.
"""

from adp_client.transport.memory import MemoryTransport as MemoryTransport
from adp_client.transport.memory import memory_pair as memory_pair

from .conformance import ClientUnderTest as ClientUnderTest
from .conformance import check_client_contract as check_client_contract
from .conformance import check_gateway_contract as check_gateway_contract
from .faults import Faults as Faults
from .faults import FaultyTransport as FaultyTransport
from .gateway import MemoryGateway as MemoryGateway
from .gateway import Session as Session
from .workers import MemoryWorkers as MemoryWorkers
