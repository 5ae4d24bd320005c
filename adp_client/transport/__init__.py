"""How bytes travel: the Transport contract, endpoints, sockets, TLS, and an in-process pair for tests."""

from .base import FileRange as FileRange
from .base import Half as Half
from .base import LocalTransport as LocalTransport
from .base import Transport as Transport
from .base import local_transport as local_transport
from .dialling import connect as connect
from .endpoints import Endpoint as Endpoint
from .endpoints import TCPEndpoint as TCPEndpoint
from .endpoints import TLSEndpoint as TLSEndpoint
from .endpoints import UnixEndpoint as UnixEndpoint
from .endpoints import parse_endpoint as parse_endpoint
from .sockets import SocketTransport as SocketTransport
from .tls import TLSTransport as TLSTransport
from .trust import TLSConfig as TLSConfig
from .trust import TLSFailure as TLSFailure
