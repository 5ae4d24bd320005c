"""How bytes travel: the Transport contract, endpoints, sockets, and an in-process pair for tests."""

from .base import FileRange as FileRange
from .base import Transport as Transport
from .endpoints import Endpoint as Endpoint
from .endpoints import TCPEndpoint as TCPEndpoint
from .endpoints import UnixEndpoint as UnixEndpoint
from .endpoints import parse_endpoint as parse_endpoint
from .sockets import SocketTransport as SocketTransport
from .sockets import connect as connect
