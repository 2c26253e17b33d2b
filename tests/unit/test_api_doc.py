"""docs/api.md says what the docstrings say. After a change of one: `./run docs`."""

from __future__ import annotations

from docs import make_api


def test_the_reference_is_current() -> None:
    assert make_api.PAGE.read_text() == make_api.page()
