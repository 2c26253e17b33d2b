"""Which counters a change raises: those that watches of its key and its folders look at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pxrs.core.records import head_key, member_key, members_prefix
from pxrs.stores.sqlite.change_counters import key_slots, slot

keys = st.text("ab/\u00e9", min_size=1, max_size=12) | st.text(min_size=1, max_size=90)


@given(keys)
def test_a_change_rings_for_its_key_and_for_every_folder_above(key: str) -> None:
    folders = [key[: at + 1] for at in range(len(key) - 1) if key[at] == "/"]
    assert key_slots(key) == {slot(name) for name in ("", key, *folders)}


def test_groups_whose_names_begin_alike_do_not_wake_each_other() -> None:
    group = "G_orders_17"
    rung = key_slots(head_key(group)) | key_slots(member_key(group, "m"))
    woken = [
        name
        for name in (f"G_orders_{number}" for number in range(200))
        if rung & {slot(head_key(name)), slot(members_prefix(name))}
    ]
    assert woken == [group]
