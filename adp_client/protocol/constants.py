"""Numbers of ADP/1. Every one of them is stated in docs/spec/adp-1.md; the section is cited here."""

import enum

MAGIC = b"ADP/"  # section 3.1
VERSION = 1  # section 4.2
HEADER_BYTES = 32  # section 3.1
NAMESPACE_BYTES = 32  # section 2: a SHA-256 fingerprint
BOOT_ID_BYTES = 16  # section 4.3
MAX_KEY_BYTES = 128  # section 2: a 64-byte hash, group and shard, and room to grow
HANDSHAKE_BODY_BYTES = 65536  # section 4.1: the body limit before limits have been exchanged
MIN_BODY_BYTES = 256  # section 4.3: what a gateway receives has room for a vector of one widest key
MAX_TEXT_BYTES = 1024  # section 5.11: human-readable reasons are short
CRITICAL_EXTENSION = 0x8000  # section 4.4: an unknown tag with this bit refuses the handshake
WORKERS_EXTENSION = 0x8001  # section 4.5: the gateway has several workers, and this is who they are
MAX_WORKERS = 256  # section 4.5
GATEWAY_ID_BYTES = 16  # section 4.5
MAX_PLACE_NAME_BYTES = 107  # section 4.5: no path of a Unix socket is longer


class Role(enum.Enum):
    """Which side of a connection this is. The client speaks first."""

    CLIENT = "client"
    GATEWAY = "gateway"


class Opcode(enum.IntEnum):
    """What a frame is about (section 5). A reply carries its request's opcode and `Flag.REPLY`."""

    HELLO = 1
    EXIST = 2
    READ = 3
    WRITE = 4
    DELETE = 5
    CHECK = 6
    FENCE = 7
    PING = 8
    GOODBYE = 9
    ERROR = 10
    RELEASE = 11
    REGION_OPEN = 12
    REGION_CLOSE = 13
    READ_REGION = 14
    WRITE_REGION = 15
    CREDIT = 16


class Flag(enum.IntFlag):
    """Header flags (section 3.2). Any other bit is a malformed frame."""

    NONE = 0
    REPLY = 1
    MORE = 2  # another frame of the same message follows


class Feature(enum.IntFlag):
    """What a side can do; the handshake keeps the intersection (section 4.4)."""

    NONE = 0
    LEASES = 1
    REGIONS = 2
    FRAGMENTS = 4  # the gateway itself cuts objects above the device limit
    CREDITS = 8  # the gateway may change the window with CREDIT
    END_TO_END = 16  # the client verifies every object that it receives, and says CHECK of a damaged one


class ErrorCode(enum.IntEnum):
    """Section 6. Below 64: the answer to a request or an item of it. From 64: the end of a connection."""

    OK = 0
    NOT_FOUND = 1
    CORRUPT = 2
    CAPACITY_EXHAUSTED = 3
    OVERLOADED = 4
    STALE_EPOCH = 5
    REFUSED = 6
    GATEWAY_FAULT = 7
    TOO_LARGE = 8

    BAD_MAGIC = 64
    UNSUPPORTED_VERSION = 65
    BAD_CHECKSUM = 66
    MALFORMED = 67
    LIMIT_EXCEEDED = 68
    UNKNOWN_OPCODE = 69
    UNEXPECTED_MESSAGE = 70
    UNAUTHENTICATED = 71
    TIMED_OUT = 72
    SHUTTING_DOWN = 73

    @property
    def ends_connection(self) -> bool:
        """Whether the code may only travel in an ERROR or GOODBYE frame."""
        return self >= 64
