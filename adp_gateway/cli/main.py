"""The parser of the command line, and the way from there to a command."""

import argparse
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence

from adp_gateway.server import AGENT

from . import inspect, serve
from .parsing import EXIT_FAILURE, EXIT_SIGNAL, OneLineParser


def make_parser() -> OneLineParser:
    """The command line."""
    parser = OneLineParser(prog="adp-gateway", description="Keep KV cache objects on local storage.")
    parser.add_argument("--version", action="version", version=AGENT)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_command(commands)
    inspect.add_commands(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status, or raises SystemExit for bad usage and --help."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
    function: Callable[[argparse.Namespace, OneLineParser], int] = options.function
    # Bad values are told in the name of the subcommand, as argparse does it.
    named = OneLineParser(prog=f"{parser.prog} {options.command}")
    try:
        return functools.partial(function, options, named)()
    except KeyboardInterrupt:
        return EXIT_SIGNAL + signal.SIGINT
    except BrokenPipeError:  # `adp-gateway dump | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
