"""The codec is loaded at first use, by whichever thread comes first."""

from __future__ import annotations

import subprocess
import sys

# Now and then two threads that import modules which import each other find them half made. So
# there must not be two: the first one that imports waits a moment for a second one.
_PROGRAM = """
import builtins, threading
from pxrs.codec import batches

real, inside, met = builtins.__import__, set(), threading.Event()

def spy(name, globals=None, *rest):
    if name.startswith("aiokafka") and (globals or {}).get("__name__") == batches.__name__:
        inside.add(threading.get_ident())
        if len(inside) > 1:
            met.set()
        met.wait(0.3)
    return real(name, globals, *rest)

builtins.__import__ = spy
threads = [threading.Thread(target=batches.new_builder, args=(1000,)) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(inside))
"""


def test_one_thread_at_a_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"
