"""Why a connection of the caller's can't be joined, or can't be committed."""

from __future__ import annotations

from typing import Any

from pxrs.errors import InvalidRequest


def no_transaction(how: str) -> InvalidRequest:
    """Joining has to wait for a transaction: without one each statement would be committed."""
    return InvalidRequest(
        "the connection commits every statement by itself and is in no transaction, so there is "
        f"none to join; open one first ({how}), and what pxrs writes lands when it commits"
    )


def is_in_a_block(which: str) -> InvalidRequest:
    """Somebody else's block is to commit, so pxrs must not."""
    return InvalidRequest(
        f"{which} commits by itself, and pxrs can't commit inside of it; pass join= instead of "
        "commits=, or leave that block out"
    )


def refuse_drivers_block(connection: Any) -> None:
    """psycopg lets nobody commit inside of its `with connection.transaction()`."""
    if getattr(connection, "_num_transactions", 0):
        raise is_in_a_block("connection.transaction()")
