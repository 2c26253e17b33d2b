"""Translates PostgreSQL's errors into errors of pxrs."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pxrs.core.queue import given_up
from pxrs.errors import (
    ConfigError,
    Fenced,
    InvalidRequest,
    OutcomeUnknown,
    PxrsError,
    SchemaMismatch,
    SessionLost,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    TransactionConflict,
)
from pxrs.stores.postgres import functions
from pxrs.stores.postgres.queues import functions as queue_functions
from pxrs.urls import about_options


def read_conninfo(conninfo: str) -> dict[str, Any]:
    """The options of a URL by libpq's names; raises `ConfigError` if libpq does not know one."""
    try:
        return conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError as error:
        said = about_options(conninfo, str(error).strip())
    raise ConfigError(
        f"{said}; besides libpq's options, postgresql:// takes schema, connections and busy_timeout"
    )


# A number or text that PostgreSQL has no column for never reaches it: the driver refuses it.
DRIVER_ERRORS = (psycopg.Error, OverflowError, UnicodeError)

_CONFLICTS = ("40001", "40P01", "23505")


def is_overtaken(error: BaseException) -> bool:
    """Whether a record was created between two statements of one commit: run it again."""
    return getattr(error, "sqlstate", None) == functions.OVERTAKEN


def is_victim(error: BaseException) -> bool:
    """Whether the engine chose this transaction to end a deadlock or a race; it is rolled back."""
    return getattr(error, "sqlstate", None) in _CONFLICTS


def was_cut(connection: psycopg.Connection[Any]) -> bool:
    """Whether the connection is gone, and with it the answer to what was sent last."""
    return connection.closed or connection.broken


def translate(error: BaseException, place: str) -> PxrsError:
    """The typed error for an error of the server, or of its driver about a value."""
    if not isinstance(error, psycopg.Error):
        return InvalidRequest(f"{place} can't hold such a value: {error}")
    text = error.diag.message_primary or str(error)
    code = error.sqlstate or ""
    if code == functions.SESSION_LOST:
        return SessionLost(f"session {text} is over; open a new one and start again")
    if code == queue_functions.FENCED:
        return Fenced(
            f"{text} items are not held any more; another worker has them, or will get them"
        )
    if code == queue_functions.GIVEN_UP:
        return given_up(text)
    if code == queue_functions.STRICT:
        return InvalidRequest(f"queue {text!r} is fifo: its items can't have a priority or a delay")
    if code == functions.BOUND:
        return InvalidRequest(f"{text!r} is bound to a session; its version can't be checked")
    if code in _CONFLICTS or code == functions.OVERTAKEN:
        return TransactionConflict(f"PostgreSQL rolled the transaction back ({text}); run it again")
    if code == functions.OLD_SNAPSHOT:
        return TransactionConflict(
            "the transaction does not see what was committed after it began, but pxrs must see it; "
            "run it again, or run it at READ COMMITTED"
        )
    if code == "25P03":
        return TransactionConflict(
            f"the transaction did nothing for as long as a session lives, and {place} rolled it "
            "back; run it again, and keep slow work outside of it"
        )
    if code == "55P03":
        return StoreBusy(
            f"another transaction has held a lock in {place} for more than 10 s; end it"
        )
    if code in ("53100", "53200"):
        return StoreFull(f"no room left in {place} ({text}); nothing was written")
    if code == "25006":
        return StoreReadOnly(
            f"{place} can't be written ({text}): it is a standby, a reader endpoint, or set to "
            "read-only; connect to the primary"
        )
    if code == "42501":
        return StoreReadOnly(f"{place} can't be written ({text}); give this role the right to")
    if code in ("XX001", "XX002"):
        return StoreDamaged(f"{place} is damaged ({text}); restore it from a backup")
    if code in ("3F000", "42P01", "42883"):
        return SchemaMismatch(
            f"{place} has lost tables of pxrs ({text}); run: pxrs store migrate URL"
        )
    if code in ("54000", "22021", "22P05", "22003"):
        return InvalidRequest(f"{place} can't hold such a value: {text}")
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return StoreUnavailable(f"{place} can't be reached: {text}")
    return StoreError(f"PostgreSQL refused a statement on {place}: {text}")


def translate_commit(error: BaseException, place: str) -> PxrsError:
    """The typed error for an error of the server's at COMMIT.

    pxrs' own constraints are checked by each statement, so only a deferred one of the caller's can
    be violated then; and it would be again if the transaction was run once more.
    """
    if isinstance(error, psycopg.errors.UniqueViolation):
        text = error.diag.message_primary or str(error)
        return StoreError(f"PostgreSQL refused a commit on {place}: {text}")
    return translate(error, place)


def lost_answer(error: BaseException, place: str) -> OutcomeUnknown:
    """Builds the error for a connection that was lost while a write was under way."""
    text = str(error).strip() or type(error).__name__
    return OutcomeUnknown(f"{place} went away before it answered ({text})")
