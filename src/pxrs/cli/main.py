"""`pxrs`: the command, its subcommands, and what it does with errors."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import Any

import click

from pxrs._version import __version__
from pxrs.cli.consume import consume
from pxrs.cli.demo import demo
from pxrs.cli.dlq import dlq
from pxrs.cli.doctor import doctor
from pxrs.cli.groups import groups
from pxrs.cli.kv import kv
from pxrs.cli.options import Settings, exit_code, shared
from pxrs.cli.produce import produce
from pxrs.cli.queues import queues
from pxrs.cli.read import read
from pxrs.cli.serve import serve
from pxrs.cli.sources import sources
from pxrs.cli.store import store
from pxrs.cli.token import token
from pxrs.cli.topics import topics
from pxrs.redaction import hidden


class Root(click.Group):
    """Turns errors into one line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (Exception, KeyboardInterrupt) as error:
            code = exit_code(error, as_json=ctx.ensure_object(Settings).json)
            if code is None:
                raise
            ctx.exit(code)
        return result


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Try it:
  pxrs topics create orders --partitions 8
  echo 'account-42:{"total": 12}' | pxrs produce orders --key-separator :
  pxrs consume orders --group billing --timeout 1""",
)
@click.version_option(__version__, "-V", "--version", message="pxrs %(version)s")
@shared
def cli(_: Settings) -> None:
    """Partitioned, ordered topics and work queues on the store you already run.

    --url and --json can stand before or after the command. Exit codes: 0 done, 1 failed,
    2 wrong usage, 130 interrupted, 143 terminated.
    """


for command in (
    topics,
    produce,
    read,
    consume,
    groups,
    sources,
    queues,
    dlq,
    kv,
    store,
    doctor,
    serve,
    token,
    demo,
):
    cli.add_command(command)


def main() -> None:
    """Runs the command with the arguments of this process."""
    sys.excepthook = _print_traceback
    for stream in (sys.stdout, sys.stderr):
        # A terminal that can't show a character gets its escape, not a crash.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    cli(prog_name="pxrs")


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints a bug's traceback without secrets: it quotes drivers, and is pasted into issues."""
    sys.stderr.write(hidden("".join(traceback.format_exception(kind, error, trace))))


if __name__ == "__main__":
    main()
