"""Asking people before something is gone."""

from __future__ import annotations

import sys

import click

from pxrs.cli.failures import FAILED


def somebody_to_ask() -> None:
    """A script has to say --yes: it would hang on a question, or answer it by accident."""
    if not sys.stdin.isatty():
        raise click.UsageError("nobody to ask: add --yes to do it without asking")


def ask(question: str, kept: str) -> None:
    """Go on only if somebody says yes."""
    if not click.confirm(question, err=True):
        click.echo(kept, err=True)
        sys.exit(FAILED)
