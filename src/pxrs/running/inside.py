"""Whether code runs inside of a handler: who waits for its own handler's end waits for itself."""

from __future__ import annotations

from contextvars import ContextVar

# A context, not a thread: what a coroutine awaits on its loop is inside of the handler, too.
_employer: ContextVar[object | None] = ContextVar("pxrs_employer", default=None)


def work_for(employer: object) -> None:
    """This thread calls the handlers of a run or listener from now on."""
    _employer.set(employer)


def employer() -> object | None:
    """Returns the run or listener whose handler is calling; None if none is."""
    return _employer.get()
