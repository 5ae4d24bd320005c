"""ADP/1 without I/O: `Connection`, its messages, events and errors. The spec is docs/spec/adp-1.md."""

from .connection import Connection as Connection
from .constants import ErrorCode as ErrorCode
from .constants import Feature as Feature
from .constants import Opcode as Opcode
from .constants import Role as Role
from .keys import ObjectKey as ObjectKey
