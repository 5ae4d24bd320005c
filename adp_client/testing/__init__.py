"""For tests of programs that use the client, and of gateways: a gateway in memory, and broken networks."""

from adp_client.transport.memory import MemoryTransport as MemoryTransport
from adp_client.transport.memory import memory_pair as memory_pair

from .faults import Faults as Faults
from .faults import FaultyTransport as FaultyTransport
from .gateway import MemoryGateway as MemoryGateway
from .gateway import Session as Session
