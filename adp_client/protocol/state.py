"""The life of a connection, as a table (spec section 7.1).

`TRANSITIONS[role][state][step]` is the next state; a missing entry is a protocol error, and its text is made
from the table. docs/spec/adp-1.md shows the same table, and a test compares the two.
"""

import enum

from .constants import ErrorCode, Role
from .errors import LocalProtocolError


class State(enum.Enum):
    """Where a connection stands."""

    START = "start"  # nothing said yet
    GREETING = "greeting"  # HELLO is out, no answer yet
    OPEN = "open"  # requests and replies flow
    DRAINING = "draining"  # the gateway has said GOODBYE: no new requests
    LEAVING = "leaving"  # the client has said GOODBYE: replies to what was asked, then the end
    CLOSED = "closed"  # nothing more will be sent or read
    FAILED = "failed"  # the peer broke the protocol


class Step(enum.Enum):
    """What happens to a connection, seen from one side."""

    SEND_HELLO = "send HELLO"
    RECEIVE_HELLO = "receive HELLO"
    SEND_WELCOME = "send WELCOME"
    RECEIVE_WELCOME = "receive WELCOME"
    SEND_REQUEST = "send a request"
    CONTINUE_REQUEST = "send another frame of a request"
    RECEIVE_REQUEST = "receive a request"
    SEND_REPLY = "send a reply"
    RECEIVE_REPLY = "receive a reply"
    SEND_CREDIT = "send CREDIT"
    RECEIVE_CREDIT = "receive CREDIT"
    SEND_GOODBYE = "send GOODBYE"
    RECEIVE_GOODBYE = "receive GOODBYE"
    SEND_GOODBYE_REPLY = "send the reply to GOODBYE"
    RECEIVE_GOODBYE_REPLY = "receive the reply to GOODBYE"
    SEND_ERROR = "send ERROR"
    RECEIVE_ERROR = "receive ERROR"
    RECEIVE_EOF = "see the end of the stream"
    VIOLATION = "see a violation"


_ALWAYS = {
    Step.SEND_ERROR: State.CLOSED,
    Step.RECEIVE_ERROR: State.CLOSED,
    Step.RECEIVE_EOF: State.CLOSED,
    Step.VIOLATION: State.FAILED,
}
_OVER = {
    State.CLOSED: {Step.RECEIVE_EOF: State.CLOSED, Step.VIOLATION: State.FAILED},
    State.FAILED: {
        Step.SEND_ERROR: State.FAILED,
        Step.RECEIVE_EOF: State.FAILED,
        Step.VIOLATION: State.FAILED,
    },
}

TRANSITIONS: dict[Role, dict[State, dict[Step, State]]] = {
    Role.CLIENT: {
        State.START: {Step.SEND_HELLO: State.GREETING, **_ALWAYS},
        State.GREETING: {Step.RECEIVE_WELCOME: State.OPEN, **_ALWAYS},
        State.OPEN: {
            Step.SEND_REQUEST: State.OPEN,
            Step.CONTINUE_REQUEST: State.OPEN,
            Step.RECEIVE_REPLY: State.OPEN,
            Step.RECEIVE_CREDIT: State.OPEN,
            Step.RECEIVE_GOODBYE: State.DRAINING,
            Step.SEND_GOODBYE: State.LEAVING,
            **_ALWAYS,
        },
        State.DRAINING: {
            Step.CONTINUE_REQUEST: State.DRAINING,  # what was begun is finished
            Step.RECEIVE_REPLY: State.DRAINING,
            Step.RECEIVE_CREDIT: State.DRAINING,
            Step.SEND_GOODBYE: State.LEAVING,
            **_ALWAYS,
        },
        State.LEAVING: {
            Step.RECEIVE_REPLY: State.LEAVING,
            Step.RECEIVE_CREDIT: State.LEAVING,
            Step.RECEIVE_GOODBYE: State.LEAVING,
            Step.RECEIVE_GOODBYE_REPLY: State.CLOSED,
            **_ALWAYS,
        },
        **_OVER,
    },
    Role.GATEWAY: {
        State.START: {Step.RECEIVE_HELLO: State.GREETING, **_ALWAYS},
        State.GREETING: {Step.SEND_WELCOME: State.OPEN, **_ALWAYS},
        State.OPEN: {
            Step.RECEIVE_REQUEST: State.OPEN,
            Step.SEND_REPLY: State.OPEN,
            Step.SEND_CREDIT: State.OPEN,
            Step.SEND_GOODBYE: State.DRAINING,
            Step.RECEIVE_GOODBYE: State.LEAVING,
            **_ALWAYS,
        },
        State.DRAINING: {
            # A request may have crossed our GOODBYE on the wire.
            Step.RECEIVE_REQUEST: State.DRAINING,
            Step.SEND_REPLY: State.DRAINING,
            Step.RECEIVE_GOODBYE: State.LEAVING,
            **_ALWAYS,
        },
        State.LEAVING: {
            Step.SEND_REPLY: State.LEAVING,
            Step.SEND_GOODBYE_REPLY: State.CLOSED,
            **_ALWAYS,
        },
        **_OVER,
    },
}


class Machine:
    """One connection's place in the table."""

    def __init__(self, role: Role) -> None:
        self.state = State.START
        self._table = TRANSITIONS[role]
        self._role = role

    def allows(self, step: Step) -> bool:
        """Whether `step` is in the table now."""
        return step in self._table[self.state]

    def take(self, step: Step) -> None:
        """Do `step`. Raises LocalProtocolError and stays where it is if the table has no such entry."""
        following = self._table[self.state].get(step)
        if following is None:
            raise LocalProtocolError(
                f"{self._role.value} cannot {step.value} while {self.state.value}",
                ErrorCode.UNEXPECTED_MESSAGE,
            )
        self.state = following
