"""From an endpoint to a transport."""

import anyio
import anyio.to_thread

from .endpoints import Endpoint, TCPEndpoint, TLSEndpoint
from .sockets import SocketTransport, dial
from .tls import TLSTransport
from .trust import TLSConfig, client_context


async def connect(
    endpoint: Endpoint, *, tls: TLSConfig | None = None, limiter: anyio.CapacityLimiter | None = None
) -> SocketTransport:
    """Dial `endpoint`; for tls://, the handshake too. Raises OSError; a TLSFailure says what TLS minds.

    Takes as long as the system and the peer let it: bound it with `anyio.fail_after`. Cancellation leaves no
    socket. `limiter`: see SocketTransport.
    """
    if not isinstance(endpoint, TLSEndpoint):
        return SocketTransport(await dial(endpoint), limiter=limiter)
    tls = TLSConfig() if tls is None else tls
    context = await anyio.to_thread.run_sync(client_context, tls, abandon_on_cancel=True)
    sock = await dial(TCPEndpoint(host=endpoint.host, port=endpoint.port))
    try:
        transport = TLSTransport(sock, context, server_name=tls.server_name or endpoint.host, limiter=limiter)
        await transport.handshake()
    except BaseException:
        sock.close()  # nobody is inside any more
        raise
    return transport
