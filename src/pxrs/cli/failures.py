"""What a user sees when something goes wrong, and the exit code that scripts see."""

from __future__ import annotations

import os
import sys

import click

from pxrs.config import public
from pxrs.errors import GroupNotEmpty, PxrsError, QueueNotFound, TopicNotFound

FAILED = 1
INTERRUPTED = 130
# What a shell reports for a program that a signal ended: this, and the signal's number.
SIGNALLED = 128
# What a shell reports for a program that SIGPIPE ended.
PIPE_CLOSED = 141


def exit_code(error: BaseException, *, as_json: bool) -> int | None:
    """Report the error; the code to exit with, or None if it is not one that is expected."""
    if isinstance(error, PxrsError):
        report(error, as_json=as_json)
        return FAILED
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _let_go_of_stdout()
        return PIPE_CLOSED
    return None


def report(error: PxrsError, *, as_json: bool) -> None:
    """One line on stderr."""
    if as_json:
        from pxrs.cli.output import json_text

        shown = {
            "type": type(error).__name__,
            "message": public(_advice(error)),
            "retryable": error.retryable,
        }
        click.echo(json_text({"error": shown}), err=True)
    else:
        click.secho(f"error: {public(_advice(error))}", fg="red", err=True)


def _advice(error: PxrsError) -> str:
    """The error's text, with what to do said in terms of this program."""
    if isinstance(error, TopicNotFound):
        return (
            f"topic {error.topic!r} does not exist; "
            f"create it with: pxrs topics create {error.topic} --partitions 8"
        )
    if isinstance(error, QueueNotFound):
        return (
            f"queue {error.queue!r} does not exist; it begins with its first item, "
            f"or with: pxrs queues create {error.queue}"
        )
    if isinstance(error, GroupNotEmpty):
        return (
            f"group {error.group!r} has members: {', '.join(error.members)}; "
            "stop them first, or fence them with --force"
        )
    return ", ".join([str(error), *getattr(error, "__notes__", ())])


def _let_go_of_stdout() -> None:
    """Nobody reads it any more: keep the interpreter from complaining as it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
