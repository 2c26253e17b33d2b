"""Nodes of NATS that lose sight of each other, with producers and consumers on either side.

`./run chaos --engine nats` does this for longer, in other ways and with deaths.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from support.split_log import FAULTS, Fault, SplitLog

pytestmark = [pytest.mark.engine("nats"), pytest.mark.long, pytest.mark.thorough]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_was_acknowledged_is_there_once_and_in_order(tmp_path: Path, fault: Fault) -> None:
    """And was handled so."""
    with closing(SplitLog(tmp_path)) as group:
        group.settle()
        fault(group, Random(3))
        group.network.heal()
        group.settle()
        group.finish()
        group.judge()
