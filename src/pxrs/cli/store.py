"""`pxrs store`: what concerns a store as a whole."""

from __future__ import annotations

import click

from pxrs.cli.options import shared
from pxrs.cli.store_copy import copy


@click.group()
@shared
def store() -> None:
    """Look after a store."""


store.add_command(copy)
