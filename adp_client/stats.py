"""What a client counts. Numbers only go up."""

import attrs


@attrs.define(kw_only=True)
class ClientStats:
    """A snapshot when it comes from `Client.stats()`."""

    connects: int = 0  # handshakes done
    connects_failed: int = 0
    connections_lost: int = 0  # after the handshake, and not by closing the client
    boots_seen: int = 0  # different boot ids, the first included
    requests: int = 0  # frames' worth of requests begun on the wire, replays included
    replies: int = 0  # final replies
    replies_abandoned: int = 0  # final replies whose caller had left
    replays: int = 0  # calls sent again on a new connection
    timeouts: int = 0  # requests whose deadline passed
    bytes_read: int = 0  # payload that landed in callers' memory
    bytes_written: int = 0  # payload sent from callers' memory
    objects_corrupt: int = 0  # read, and the checksum did not match
    checks_dropped: int = 0  # corrupt objects that could not be reported
    leases_granted: int = 0  # by requests: a call over many keys may get several
    leases_released: int = 0  # sent back; the others ended with their time or their connection
