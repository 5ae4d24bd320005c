"""What becomes of a request whose connection ended before its answer (spec section 7.5). Pure.

EXIST and READ change nothing, and a WRITE carries its key and its content, so a second one does no harm:
they are sent again, once. DELETE could remove what somebody stored in between, FENCE orders what the old
connection did, PING asks about the old connection: they fail and say whether they may have had an effect.
A request of which no byte was sent can always go again.
"""

import enum

from .protocol.constants import Opcode


class Fate(enum.Enum):
    """What to do with a lost request."""

    REPLAY = "replay"
    FAIL = "fail"


MAX_REPLAYS = 1

#: verb -> fate once its bytes may have reached the gateway.
MAYBE_APPLIED: dict[Opcode, Fate] = {
    Opcode.EXIST: Fate.REPLAY,
    Opcode.READ: Fate.REPLAY,
    Opcode.WRITE: Fate.REPLAY,
    Opcode.CHECK: Fate.REPLAY,
    Opcode.DELETE: Fate.FAIL,
    Opcode.FENCE: Fate.FAIL,
    Opcode.PING: Fate.FAIL,
}


def fate(verb: Opcode, *, was_sent: bool, replays: int) -> Fate:
    """Decide. `replays` is how often the call has been replayed after bytes of it were sent."""
    if not was_sent:
        return Fate.REPLAY
    if replays >= MAX_REPLAYS:
        return Fate.FAIL
    return MAYBE_APPLIED[verb]
