"""Connections of callers: who commits has to be said."""

from __future__ import annotations

from typing import Any

from pxrs.errors import InvalidRequest


def given_connection(verb: str, unsaid: object, commits: Any, join: Any) -> Any:
    """What `Stores.atomic` gets: nothing, one that pxrs commits, or one that is joined."""
    refuse_unsaid(
        unsaid, f"{verb}(join=connection) if you do, {verb}(commits=connection) if pxrs shall"
    )
    if commits is not None and join is not None:
        raise InvalidRequest("a connection is either joined or committed: pass commits= or join=")
    if commits is None:
        return join
    from pxrs.stores.connections import Lent

    return Lent(commits)


def refuse_unsaid(connection: object, instead: str) -> None:
    """A connection alone does not say who commits, and what it is doing must not decide that."""
    if connection is not None:
        raise InvalidRequest(
            f"{type(connection).__name__} alone does not say who commits it; write {instead}"
        )


def check_connection(connection: object) -> None:
    """Refuse a message for nobody's transaction."""
    if connection is None:
        raise InvalidRequest(
            "connection = None; pass the connection whose transaction the message belongs to, or "
            "send it with px.producer()"
        )
