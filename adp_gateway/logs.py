"""Log lines on standard error, for people (`text`) or for machines (`json`: one object a line)."""

import json
import logging
import sys
import time
from collections import OrderedDict
from typing import Any, Literal

import attrs

LogFormat = Literal["text", "json"]

MOST_SHOWN = 200  # characters of a peer's own text


class JsonFormatter(logging.Formatter):
    """`time`, `level`, `logger`, `message`, then the record's `data`, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "data", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


@attrs.define
class Complaints:
    """Who has been complained of lately: one line for each address and matter, then silence for a while.

    Clients choose how often they connect, and must not be able to fill the log with it. The table is bounded
    too: beyond `most` at a time, all others share one place in it.
    """

    silence_seconds: float = 10.0
    most: int = 64
    _told: OrderedDict[tuple[str, str], tuple[float, int]] = attrs.field(factory=OrderedDict, init=False)

    def about(self, peer: str, matter: str, *, now: float) -> str | None:
        """None if a line about this would be one too many; else what to put at its end."""
        turn = self._turn(peer, matter, now)
        return None if turn is None else _said(*turn)

    def _turn(self, peer: str, matter: str, now: float) -> tuple[int, str] | None:
        """How many lines have been left out since the last one, and whose they would have been."""
        while self._told and now - next(iter(self._told.values()))[0] >= self.silence_seconds * 6:
            self._told.popitem(last=False)
        who = (_address(peer), matter)
        if who not in self._told and len(self._told) >= self.most:
            who = ("", "")
        since, unsaid = self._told.get(who, (now - self.silence_seconds, 0))
        if now - since < self.silence_seconds:
            self._told[who] = (since, unsaid + 1)
            return None
        self._told[who] = (now, 0)
        self._told.move_to_end(who)
        return unsaid, "from others" if who == ("", "") else "from there"

    def tell(
        self,
        logger: logging.Logger,
        level: int,
        peer: str,
        matter: str,
        reason: str = "",
        *,
        now: float,
        bug: BaseException | None = None,
    ) -> None:
        """Log one line about `peer`, unless it would be one too many; with the traceback of `bug`.

        `matter` is one of a few, whatever the peer does: what it may choose belongs into `reason`.
        """
        turn = self._turn(peer, matter, now)
        if turn is not None:
            data = {"event": "complaint", "peer": peer, "matter": matter, "reason": reason, "unsaid": turn[0]}
            told = f": {reason}" if reason else ""
            logger.log(
                level, "%s: %s%s%s", peer, matter, told, _said(*turn), exc_info=bug, extra={"data": data}
            )


def _said(unsaid: int, where: str) -> str:
    return f" (and {unsaid} times more {where} since the last line about it)" if unsaid else ""


def shown(text: str) -> str:
    """Text that a peer may have chosen, as it may stand in a line: 200 characters, no control characters."""
    cut = text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."
    return "".join(
        letter if letter.isprintable() and letter != "\\" else letter.encode("unicode_escape").decode()
        for letter in cut
    )


def _address(peer: str) -> str:
    """Where a peer comes from, without what tells its connections apart."""
    return peer.rpartition("#" if peer.startswith("unix:") else ":")[0] or peer


def configure(log_format: LogFormat) -> None:
    """Send the package's records to standard error. For the process's entry point only."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        formatter = logging.Formatter(
            "%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
    logger = logging.getLogger("adp_gateway")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
