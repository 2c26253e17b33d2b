"""`pxrs store`: what concerns a store as a whole."""

from __future__ import annotations

import click

from pxrs.cli.options import Settings, shared
from pxrs.cli.output import print_json
from pxrs.cli.store_copy import copy


@click.group()
@shared
def store() -> None:
    """Look after a store."""


@store.command(short_help="Make the tables of the store, or bring them up to date.")
@click.argument("place", metavar="URL", required=False)
@shared
@click.pass_obj
def migrate(settings: Settings, place: str | None) -> None:
    """Make the tables of the store at URL, or bring them to this version of pxrs.

    Opening a store does that by itself; this is for a role that may where others may not.
    """
    from pxrs.stores.open import migrate_stores

    done = migrate_stores(place or settings.place)
    if settings.json:
        print_json([each._asdict() for each in done])
        return
    for each in done:
        if each.after is None:
            click.echo("up to date")
        elif each.before == each.after:
            click.echo(f"up to date: version {each.after}")
        else:
            click.echo(f"migrated from version {each.before} to {each.after}")


store.add_command(copy)
