"""Checks connections that callers pass: the call must say who commits."""

from __future__ import annotations

from typing import Any

from pxrs.errors import InvalidRequest
from pxrs.options import TransactionOptions, refuse_unknown


def given_connection(verb: str, unsaid: object, options: TransactionOptions) -> Any:
    """Returns the connection for `Stores.atomic`: none, one that pxrs commits, or one to join."""
    refuse_unknown(verb, options, TransactionOptions)
    refuse_unsaid(
        unsaid,
        f"px.{verb}(join=connection) if you commit, px.{verb}(commits=connection) if pxrs shall",
    )
    commits, join = options.get("commits"), options.get("join")
    if commits is not None and join is not None:
        raise InvalidRequest(
            "pass commits= or join=, not both: a connection is either committed by pxrs or joined"
        )
    if commits is None:
        return join
    from pxrs.stores.connections import Lent

    return Lent(commits)


def refuse_unsaid(connection: object, instead: str) -> None:
    """Rejects a connection without `join=` or `commits=`: its state must not decide who commits."""
    if connection is not None:
        raise InvalidRequest(
            f"a {type(connection).__name__} alone does not say who commits it; write {instead}"
        )


def check_connection(connection: object) -> None:
    """Rejects a missing connection."""
    if connection is None:
        raise InvalidRequest(
            "connection must be the one whose transaction the message belongs to, got None; "
            "without one, send with px.producer()"
        )
