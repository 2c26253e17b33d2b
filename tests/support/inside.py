"""The child's side of `support.child`."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
from typing import Any

_PR_SET_PDEATHSIG = 1
_voice = -1
_speaking = threading.Lock()


def say(word: Any) -> None:
    """Tell the parent. A killed child says it whole or without the line's end.

    One at a time: a pipe keeps only short writes in one piece.
    """
    with _speaking:
        os.write(_voice, (json.dumps(word) + "\n").encode())


def wait_for_parent() -> None:
    """Block until the parent tells this process to go on."""
    sys.stdin.buffer.readline()


def main() -> None:
    """Run the function that the command line names."""
    global _voice
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    target, voice, args = sys.argv[1:]
    _voice = int(voice)
    module, name = target.split(":")
    getattr(importlib.import_module(module), name)(*json.loads(args))
