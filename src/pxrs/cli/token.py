"""`pxrs token`: who may ask the nodes of `pxrs serve` for what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pxrs.cli.options import Settings, ask, seconds, shared, yes_option
from pxrs.cli.show import human_time

if TYPE_CHECKING:
    from pxrs.app import Pxrs
    from pxrs.server.tokens import Tokens


@click.group()
def token() -> None:
    """Tokens for clients of `pxrs serve`."""


@token.command()
@click.argument("name")
@click.option(
    "--allow", multiple=True, metavar="RIGHT",
    help="KIND:NAME:ACTIONS such as topic:orders*:read,write. Repeatable.",
)  # fmt: skip
@click.option("--admin", is_flag=True, help="Allow everything.")
@click.option("--expires", metavar="DURATION", help="After 30d, 12h …  [default: never]")
@shared
def create(
    settings: Settings, name: str, allow: tuple[str, ...], admin: bool, expires: str | None
) -> None:
    """Create a token and print it, once: only a hash of it is kept.

    Kinds are topic, group, queue, key and cluster; actions are read, write and admin. A name that
    ends with * is a prefix.
    """
    from pxrs.server.tokens import all_rights, parse_right

    rights = all_rights() if admin else tuple(parse_right(text) for text in allow)
    lifetime = None if expires is None else seconds(expires)
    with settings.create() as px:
        bearer = _tokens(px).create(name, rights, lifetime)
    settings.print({"name": name, "token": bearer}, bearer)


@token.command("list")
@shared
def list_tokens(settings: Settings) -> None:
    """List tokens and their rights."""
    with settings.connect() as px:
        found = _tokens(px).list()
    document = [
        {
            "name": each.name,
            "rights": [str(right) for right in each.rights],
            "created_ms": each.created_ms,
            "expires_ms": each.expires_ms,
        }
        for each in found
    ]
    rows = [
        (
            each.name,
            human_time(each.created_ms),
            "never" if each.expires_ms is None else human_time(each.expires_ms),
            " ".join(map(str, each.rights)),
        )
        for each in found
    ]
    columns = ("name", "created", "expires", "rights")
    settings.print_list("tokens", document, columns, rows, left=columns)


@token.command(short_help="Give a token a new secret and print it.")
@click.argument("name")
@shared
def rotate(settings: Settings, name: str) -> None:
    """Give a token a new secret and print it; the former one is good for another hour."""
    with settings.connect() as px:
        bearer = _tokens(px).rotate(name)
    settings.print({"name": name, "token": bearer}, bearer)


@token.command()
@click.argument("name")
@yes_option
@shared
def revoke(settings: Settings, name: str, yes: bool) -> None:
    """Revoke a token: nodes refuse it within seconds."""
    if not yes:
        ask(f"revoke token {name!r}?")
    with settings.connect() as px:
        _tokens(px).revoke(name)
    settings.print({"revoked": name}, f"revoked {name}")


def _tokens(px: Pxrs) -> Tokens:
    from pxrs.clock import SYSTEM_CLOCK
    from pxrs.server.tokens import Tokens

    return Tokens(px.stores.coord, SYSTEM_CLOCK)
