"""What all commands have in common: how bad usage is told, and what an exit status means."""

import argparse
from typing import NoReturn

EXIT_OK = 0
EXIT_FAILURE = 1  # also what `check` says of damage that is left
EXIT_USAGE = 2
EXIT_STORE = 3
EXIT_SIGNAL = 128  # plus the number of the signal

STORE_STATUS = (
    "  3    the data directory cannot be used: it is in use, somebody else's, newer, or not accessible"
)


class OneLineParser(argparse.ArgumentParser):
    """Bad usage is one line, without the usage text around it."""

    def error(self, message: str) -> NoReturn:
        """One line, exit status 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")
