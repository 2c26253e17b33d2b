"""Nodes of etcd that lose sight of each other, with members of a group on either side.

`./run chaos` does this for longer, in other ways and with deaths.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from pxrs.core.records import Claim, decode
from pxrs.errors import OutcomeUnknown, StoreUnavailable
from pxrs.types import Check, Conflict, Put
from support.loaded import GROUP
from support.site import open_coord
from support.split_group import FAULTS, Fault, SplitGroup, isolate_leader

pytestmark = [pytest.mark.engine("etcd"), pytest.mark.long, pytest.mark.thorough]


def test_a_leader_without_followers_commits_nothing(tmp_path: Path) -> None:
    group = SplitGroup(tmp_path)
    try:
        group.settle()
        leader = group.leader()
        assert leader is not None
        with closing(open_coord(f"{group.url_of(leader)}?timeout=3")) as behind:
            owner = group.members[leader][0]
            mine = next(
                record
                for record in behind.list(f"claims/{GROUP}/")
                if decode(record, Claim).name == owner
            )
            stale = [Check(mine.key, mine.version)], [Put(mine.key, mine.value)]
            isolate_leader(group, Random(0))
            # Others own it by now. Who asks the old leader neither writes nor reads what was.
            with pytest.raises((StoreUnavailable, OutcomeUnknown)):
                behind.commit(*stale)
            with pytest.raises(StoreUnavailable):
                behind.get(mine.key)
            group.network.heal()
            group.settle()
            assert isinstance(behind.commit(*stale), Conflict)
        group.finish()
        group.judge()
    finally:
        group.close()


@pytest.mark.parametrize("fault", FAULTS[1:], ids=lambda fault: fault.__name__)
def test_nothing_is_lost_and_nothing_has_two_owners(tmp_path: Path, fault: Fault) -> None:
    with closing(SplitGroup(tmp_path, to_be_killed=True)) as group:
        group.settle()
        fault(group, Random(3))
        group.network.heal()
        group.settle()
        group.finish()
        group.judge()
