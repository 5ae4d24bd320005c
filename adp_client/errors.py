"""Every error that a user of the client can see, in one place (`adp_client.protocol.errors` defines them).

ADPError
  ConfigError(ValueError)     configuration that cannot be used, made by hand or of data; `.problems`
  LocalProtocolError          you asked for something that the spec forbids; nothing was sent
  RemoteProtocolError         the gateway broke the spec (the link reopens; seen as a cause)
  LinkError
    ConnectFailed             no connection within the verb's own time
    LinkLost                  it broke under a request that cannot be sent twice; `.maybe_applied`
    LinkRefused               the gateway ended the connection and said why (seen as a cause)
    LinkClosed                you closed the client
  RequestTimeout(TimeoutError)
  RequestError                the gateway said no to a whole request; one class per ErrorCode
"""

from .protocol.errors import ADPError as ADPError
from .protocol.errors import CapacityExhausted as CapacityExhausted
from .protocol.errors import ConfigError as ConfigError
from .protocol.errors import ConnectFailed as ConnectFailed
from .protocol.errors import GatewayFault as GatewayFault
from .protocol.errors import LinkClosed as LinkClosed
from .protocol.errors import LinkError as LinkError
from .protocol.errors import LinkLost as LinkLost
from .protocol.errors import LinkRefused as LinkRefused
from .protocol.errors import LocalProtocolError as LocalProtocolError
from .protocol.errors import ObjectCorrupt as ObjectCorrupt
from .protocol.errors import ObjectNotFound as ObjectNotFound
from .protocol.errors import ObjectTooLarge as ObjectTooLarge
from .protocol.errors import Overloaded as Overloaded
from .protocol.errors import ProtocolError as ProtocolError
from .protocol.errors import Refused as Refused
from .protocol.errors import RemoteProtocolError as RemoteProtocolError
from .protocol.errors import RequestError as RequestError
from .protocol.errors import RequestTimeout as RequestTimeout
from .protocol.errors import StaleEpoch as StaleEpoch
