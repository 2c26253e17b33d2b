"""Errors as `application/problem+json`: a status, a code, what happened and what to do."""

from __future__ import annotations

import msgspec

from pxrs import errors

PROBLEM = "application/problem+json"

# The first class that fits counts: subclasses stand before their bases.
_STATUSES: tuple[tuple[type[errors.PxrsError], int], ...] = (
    (errors.TopicNotFound, 404),
    (errors.PartitionNotFound, 404),
    (errors.QueueNotFound, 404),
    (errors.GroupNotFound, 404),
    (errors.TopicExists, 409),
    (errors.QueueExists, 409),
    (errors.GroupExists, 409),
    (errors.GroupNotEmpty, 409),
    (errors.OffsetOutOfRange, 416),
    (errors.MessageTooLarge, 413),
    (errors.InvalidRequest, 400),
    (errors.StoreFull, 507),
    (errors.OutcomeUnknown, 504),
    (errors.StoreBusy, 503),
    (errors.StoreUnavailable, 503),
    (errors.StoreReadOnly, 503),
    (errors.BufferFull, 503),
    (errors.DeliveryFailed, 503),
    (errors.Closed, 503),
    (errors.ProducerFenced, 409),
    (errors.SequenceGap, 409),
    (errors.NotLeader, 503),
    (errors.VersionMismatch, 412),
    (errors.AlreadyExists, 409),
    (errors.CommitConflict, 409),
    (errors.TransactionConflict, 409),
    (errors.Fenced, 409),
    (errors.SessionLost, 409),
    (errors.PermissionDenied, 403),
    (errors.NotAtomic, 409),
)
# Errors for which HTTP has a word of its own.
_CODES: dict[type[errors.PxrsError], str] = {errors.PermissionDenied: "forbidden"}


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of every answer that is not a success. `retryable`: the same request may succeed."""

    title: str
    status: int
    code: str
    detail: str = ""
    retryable: bool = False
    request_id: str = ""
    start: int | None = None
    end: int | None = None


class HttpError(Exception):
    """A refusal by the HTTP layer itself."""

    def __init__(
        self, status: int, code: str, detail: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.headers = headers or {}


def told(error: errors.PxrsError) -> str:
    """The text of an error for a client. A store's own text may name its address and its users."""
    if isinstance(error, errors.StoreError) or isinstance(error.__cause__, errors.StoreError):
        return "the store did not do this; the node's log says why"
    return str(error)


def _advice(error: errors.PxrsError) -> str | None:
    """The error's text, with the request that mends it; its own text has a call of Python."""
    if isinstance(error, errors.TopicNotFound):
        return f"topic {error.topic!r} does not exist; create it: POST /v1/topics"
    if isinstance(error, errors.QueueNotFound):
        return (
            f"queue {error.queue!r} does not exist; "
            f"put an item into it: POST /v1/queues/{error.queue}/items"
        )
    return None


def problem_of(error: Exception, request_id: str) -> Problem:
    """The problem that a client gets. That of a bug in pxrs gives nothing of its inside away."""
    if isinstance(error, HttpError):
        return Problem(
            title=error.code.replace("_", " "),
            status=error.status,
            code=error.code,
            detail=str(error),
            retryable=error.status == 503,
            request_id=request_id,
        )
    if isinstance(error, errors.PxrsError):
        status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
        code = _CODES.get(type(error), error.code)
        held = isinstance(error, errors.OffsetOutOfRange) and (error.start, error.end)
        return Problem(
            title=code.replace("_", " "),
            status=status,
            code=code,
            detail=_advice(error) or told(error),
            retryable=error.retryable or isinstance(error, errors.DeliveryFailed | errors.Closed),
            request_id=request_id,
            start=held[0] if held else None,
            end=held[1] if held else None,
        )
    return Problem(
        title="internal error",
        status=500,
        code="internal_error",
        detail="the node failed to handle this request; its log has the details under this id",
        request_id=request_id,
    )
