"""The diagram in `docs/groups.md` is drawn from the table that the code runs on.

After a change of the table: `PXRS_REWRITE=1 ./run test tests/unit/core/test_groups_doc.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pxrs.core import records
from pxrs.core.group import MOVES

DOC = Path(__file__).parents[3] / "docs" / "groups.md"


def mermaid() -> str:
    """`MOVES` as a state diagram."""
    lines = [f"    {state} --> {after}: {event}" for (state, event), after in MOVES.items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> away", *lines])


def test_the_diagram_is_the_table() -> None:
    text = DOC.read_text()
    drawn = re.sub(r"(?<=```mermaid\n).*?(?=```)", mermaid() + "\n", text, flags=re.DOTALL)
    if os.environ.get("PXRS_REWRITE"):
        DOC.write_text(drawn)
    else:
        assert drawn == text


def test_the_doc_names_every_key() -> None:
    text = DOC.read_text()
    keys = re.findall(r"^    (\w+/.+?)  ", records.__doc__ or "", re.MULTILINE)
    assert len(keys) == 6
    assert [key for key in keys if f"`{key}`" not in text] == []
