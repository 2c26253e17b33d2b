"""A network that swallows everything, without a word: a proxy can't do that, the kernel can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import engines
import pxrs
from pxrs.errors import OutcomeUnknown, PxrsError, StoreUnavailable
from pxrs.types import Put

pytestmark = [pytest.mark.engine("postgres"), pytest.mark.thorough]
# The kernel gives up after the 15 s of `tcp_user_timeout`; a new connection after 10 s.
_PATIENCE = 90.0
_TESTS = Path(__file__).parents[1]
_CODE = "from postgres.test_silent_networks import use_a_silent_server as run; run()"


def tc(*words: str) -> None:
    subprocess.run(["tc", "qdisc", *words], check=True, capture_output=True)


def use_a_silent_server() -> None:
    """In a network of its own: print what calls raise while nothing passes, and what is there."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    raised = []
    with engines.build("postgres") as engine:
        engine.start()
        with pxrs.connect(engine.url) as px:
            coord = px.stores.coord
            coord.commit([], [Put("k", b"1")])
            # One byte a second, and room for one.
            tc("add", "dev", "lo", "root", "tbf", "rate", "8bit", "burst", "1", "limit", "1")
            for call in (
                lambda: coord.commit([], [Put("k", b"2")]),
                lambda: coord.get("k"),
            ):
                try:
                    call()
                except PxrsError as error:
                    raised.append(type(error).__name__)
            tc("del", "dev", "lo", "root")
            record = coord.get("k")
            raised.append("" if record is None else record.value.decode())
    print(json.dumps(raised))


def test_a_silent_network_is_given_up() -> None:
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", _CODE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), str(_TESTS.parent)])},
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
    )
    if any(word in done.stderr for word in ("unshare:", "CalledProcessError", "FileNotFound")):
        pytest.skip(f"no network can be made silent here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    commit, read, value = json.loads(done.stdout)
    # The first one if it was sent on a connection, the other if there was none.
    assert commit in (OutcomeUnknown.__name__, StoreUnavailable.__name__)
    assert read == StoreUnavailable.__name__
    assert value == "1"
