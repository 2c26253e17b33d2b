"""Where the command `pxrs` starts.

Beside the package, not in it: importing that takes a while, and Ctrl-C in that while shall end the
program as it does later, not with the place where the imports were.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    """Import the command line and run it."""
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from pxrs.cli.main import main as run

    signal.signal(signal.SIGINT, interrupted)
    run()


def _leave(number: int, frame: FrameType | None) -> None:
    """At once: nothing was done yet that would have to be put away."""
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
