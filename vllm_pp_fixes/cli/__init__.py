"""What a person runs: `vllm-pp-fixes demo`, `status`, `check`, `plan`, `diff`. No server imports anything of it."""

from __future__ import annotations

import argparse
import os
import sys

from ..version import identity


class CommandError(Exception):
    """Bad input: the message is one line that says what to do."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status (2 for bad input)."""
    from . import check, demo, diff, plan, status

    parser = argparse.ArgumentParser(prog="vllm-pp-fixes", description="Pipeline parallelism of multimodal models.")
    parser.add_argument("--version", action="version", version=identity())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (demo, status, check, plan, diff):
        sub = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        status_of_command = arguments.run(arguments)
        sys.stdout.flush()
        return status_of_command
    except CommandError as error:
        print(f"vllm-pp-fixes: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever reads has seen enough (`status | head`); what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
