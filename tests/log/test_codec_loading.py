"""The codec is loaded at first use, and several threads may use it first."""

from __future__ import annotations

import subprocess
import sys

import pytest

# One thread is half-way through the import when the others begin theirs. Its packages import
# each other in a circle: Python then shows the others modules that are not finished.
PROGRAM = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from pxrs.log.batches import new_builder

half_way, others = threading.Event(), threading.Barrier(4)
sys.setswitchinterval(1e-6)

class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "aiokafka.record" and not half_way.is_set():
            half_way.set()
            others.wait()

def late():
    half_way.wait()
    others.wait()
    new_builder(1000)

sys.meta_path.insert(0, Spy())
with ThreadPoolExecutor(4) as pool:
    for future in [pool.submit(new_builder, 1000), *(pool.submit(late) for _ in range(3))]:
        future.result()
"""


@pytest.mark.parametrize("_", range(5))
def test_threads_may_need_the_codec_at_the_same_time(_: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
