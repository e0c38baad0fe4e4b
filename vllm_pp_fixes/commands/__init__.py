"""What a person runs: `vllm-pp-fixes demo`, `status`, `check`, `diff`. Nothing in here is imported inside a server."""

from __future__ import annotations

import argparse
import sys

from .. import __version__


class CommandError(Exception):
    """Bad input: the message is one line that says what to do."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status (2 for bad input)."""
    from . import check, demo, diff, status

    parser = argparse.ArgumentParser(prog="vllm-pp-fixes", description="Pipeline parallelism of multimodal models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (demo, status, check, diff):
        sub = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except CommandError as error:
        print(f"vllm-pp-fixes: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
