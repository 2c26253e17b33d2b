"""Runs the example of docs/postgresql.md on a real server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "postgresql.md"

pytestmark = pytest.mark.engine("postgres")


def test_the_example_prints_what_it_says(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(import.*?)```", DOCS.read_text(), re.DOTALL)
    exec(example, {"URL": postgres_url})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*  # (.+)", example)


def test_the_page_names_every_table() -> None:
    from pxrs.stores.postgres import schema

    statements = " ".join(schema.steps(0, schema.VERSION))
    made = set(re.findall(r"CREATE (?:TABLE|VIEW) @\.(\w+)", statements))
    assert len(made) > 10
    assert [name for name in sorted(made) if f"`{name}`" not in DOCS.read_text()] == []
