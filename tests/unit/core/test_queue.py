"""An item's moves: the table is what is executed, and the diagram is drawn from it.

After a change of the table: `PXRS_REWRITE=1 ./run test tests/unit/core/test_queue.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import get_args

import pytest

from pxrs.core.queue import MOVES, ItemEvent, WorkQueue, move
from pxrs.errors import IllegalMove
from pxrs.types import Holder, ItemState, NewItem, Queue

DOC = Path(__file__).parents[3] / "docs" / "queues.md"


def mermaid() -> str:
    """`MOVES` as a state diagram."""
    lines = [f"    {state} --> {after}: {event}" for (state, event), after in MOVES.items()]
    return "\n".join(
        ["stateDiagram-v2", "    [*] --> waiting: put", *lines, "    held --> [*]: done"]
    )


def test_the_diagram_is_the_table() -> None:
    text = DOC.read_text()
    drawn = re.sub(r"(?<=```mermaid\n).*?(?=```)", mermaid() + "\n", text, flags=re.DOTALL)
    assert "```mermaid" in text
    if os.environ.get("PXRS_REWRITE"):
        DOC.write_text(drawn)
    else:
        assert drawn == text


@pytest.mark.parametrize("state", ItemState)
@pytest.mark.parametrize("event", get_args(ItemEvent))
def test_what_is_not_in_the_table_is_refused(state: ItemState, event: ItemEvent) -> None:
    if (state, event) in MOVES:
        assert move(state, event) is MOVES[state, event]
    else:
        with pytest.raises(IllegalMove, match=f"an item that is {state} can't be {event}"):
            move(state, event)


def test_a_move_that_is_not_in_the_table_is_not_made() -> None:
    queue = WorkQueue(Queue(name="q"))
    queue.put(NewItem(queue="q", body=b"x"), 0)
    item = queue.items[1]
    queue.hold(item, Holder("s", "tx"), None, None, 0)
    with pytest.raises(IllegalMove):
        queue.hold(item, Holder("s", "other"), None, None, 0)
