"""Translates a driver's errors into errors of pxrs."""

from __future__ import annotations

from pxrs.errors import (
    InvalidRequest,
    PxrsError,
    SchemaMismatch,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    TransactionConflict,
)

_DEADLOCK = {1205, 1213}
_FULL = {1021, 1114}
_TOO_LARGE = {1153}
_NO_TABLE = {1146}
_READ_ONLY = {1290, 1792, 1836}
_GONE = {
    0, 1040, 1053, 1152, 1158, 1159, 1160, 1161, 1927, 2002, 2003, 2006, 2013, 2014, 2026, 2045,
    2055, 4031,
}  # fmt: skip


class Raced(Exception):  # noqa: N818 - the transaction is run again
    """The record exists already: another transaction created it just now."""


def translated(error: BaseException, place: str) -> PxrsError | Raced | None:
    """Translate a driver's error, wrapped by SQLAlchemy or not; None for any other error."""
    own = getattr(error, "orig", None) or error
    # Every driver has classes of these names.
    kinds = {kind.__name__ for kind in type(own).__mro__}
    if "Error" not in kinds:
        return None
    code = own.args[0] if own.args else None
    text = f"{place}: {own}"
    if "IntegrityError" in kinds:
        return Raced(text)
    if code in _DEADLOCK:
        return TransactionConflict(text)
    if code in _FULL:
        return StoreFull(text)
    if code in _TOO_LARGE:
        return InvalidRequest(text)
    if code in _NO_TABLE:
        return SchemaMismatch(
            f"{place} has lost tables of pxrs ({own}); restore them, or start this process again"
        )
    if code in _READ_ONLY:
        return StoreReadOnly(text)
    # python-oracledb has an object in the place of the error number.
    if code in _GONE or getattr(code, "isrecoverable", False):
        return StoreUnavailable(text)
    return StoreError(text)
