"""The command `adp-gateway`.

`serve` writes one line to standard output, `ready ENDPOINT...`, when clients can connect: a script can wait
for it. What is said beside that goes to standard error. `stat`, `dump` and `check` write what was asked for
to standard output.
"""

from .main import main, make_parser

__all__ = ["main", "make_parser"]
