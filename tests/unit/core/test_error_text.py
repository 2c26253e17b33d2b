"""Errors in words that can be stored."""

from __future__ import annotations

from pxrs.core.error_text import describe, storable


class Speechless(Exception):  # noqa: N818 - that is what it is
    def __str__(self) -> str:
        raise ValueError("no words")


def test_errors_become_words_that_can_be_stored() -> None:
    assert describe(KeyError("x")) == "KeyError: 'x'"
    assert describe(Speechless()) == "Speechless"
    assert describe(ValueError("a\0b \udc80")) == "ValueError: a\\x00b \\udc80"
    assert len(storable("x" * 10**6)) < 3000
