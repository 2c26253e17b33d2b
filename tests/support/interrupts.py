"""An exception at any point where CPython could raise one that comes from outside.

Signal handlers run, and what they raise comes up, after a call, at a loop's end and at a
function's start: never between two plain instructions.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_POINTS = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "FOR_ITER"}


def interrupted_at(
    point: int, folder: str, work: Callable[[], None], strike: Callable[[], None]
) -> bool:
    """Run `work`; `strike` at its `point`-th such place in the folder. Whether it got so far."""
    passed = 0
    struck = False
    last: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed, struck
        if struck or folder not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if last.get(frame) in _POINTS:
                passed += 1
                if passed > point:
                    struck = True
                    sys.settrace(None)
                    strike()
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if name != "CACHE":
                last[frame] = name
        elif event == "return":
            last.pop(frame, None)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return struck
