"""An exception at any point where CPython could raise one that comes from outside.

Signal handlers run, and what they raise comes up, after a call, at a loop's end and at a
function's start: never between two plain instructions.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

# The rooms that act between callers and stores. An engine's own code has tests of its own.
ROOMS = re.compile(
    r"/pxrs/(producing|groups|queues|consuming|running|app|topics|codec/messages|arguments"
    r"|callers|loop)\b"
)
_POINTS = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "FOR_ITER"}


def interrupted_at(
    point: int,
    work: Callable[[], None],
    strike: Callable[[], None],
    files: re.Pattern[str] = ROOMS,
) -> bool:
    """Run `work`; `strike` at its `point`-th such place in these files. Whether it got so far."""
    passed = 0
    struck = False
    last: dict[FrameType, tuple[str, int]] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed, struck
        if struck or not files.search(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            name, at = last.get(frame, ("", 0))
            if name in _POINTS:
                passed += 1
                if passed > point and _handler(frame, at) == _handler(frame, frame.f_lasti):
                    struck = True
                    sys.settrace(None)
                    strike()
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if name != "CACHE":
                last[frame] = name, frame.f_lasti
        elif event == "return":
            last.pop(frame, None)
        return trace

    before = sys.gettrace()
    # Python 3.12 traces instructions only if some frame wanted that before the trace was set.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return struck


def _handler(frame: FrameType, at: int) -> int | None:
    """Where an exception of this instruction is handled in its function.

    The trace is told of the next instruction, but what comes from outside comes up at the one
    that was done: where those differ, as at the end of a `with`, it would come too late.
    """
    code: Any = dis.Bytecode(frame.f_code)
    for entry in code.exception_entries:
        if entry.start <= at < entry.end:
            return int(entry.target)
    return None
