"""Nodes of NATS that lose sight of each other, with producers and consumers on either side.

`./run chaos --engine nats` does this for longer, in other ways and with deaths.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from support.split_log import SplitLog, isolate_leader

pytestmark = [pytest.mark.engine("nats"), pytest.mark.long, pytest.mark.thorough]


def test_a_leader_without_followers_loses_no_message(tmp_path: Path) -> None:
    """What was acknowledged is there once, in order, and was handled so."""
    with closing(SplitLog(tmp_path)) as group:
        group.settle()
        isolate_leader(group, Random(0))
        group.network.heal()
        group.settle()
        group.finish()
        group.judge()
