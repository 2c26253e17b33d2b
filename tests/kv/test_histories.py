"""What is said of histories of keys: every verdict is silent on what is right, and heard else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pxrs.types import ABSENT, Version
from support.keys_history import NOTHING, Did, Seen, judge

ONE, TWO, THREE = Version(1, 1), Version(1, 2), Version(2, 3)
A = Seen("a", ONE)


def did(kind: str, value: str | None, called: float, **more: Any) -> Did:
    """An operation that took one second, and was done."""
    more = {"outcome": "done", "returned": called + 1, "took": 1.0, **more}
    return Did("rest-0", kind, "k", value=value, called=called, **more)


def put(value: str, version: Version | None, called: float, **more: Any) -> Did:
    return did("put", value, called, version=version, **more)


def get(value: str | None, version: Version, called: float, **more: Any) -> Did:
    return did("get", value, called, version=version, **more)


def lost(kind: str, value: str | None, called: float, **more: Any) -> Did:
    return did(kind, value, called, outcome="unknown", returned=math.inf, **more)


RIGHT: dict[str, list[Did]] = {
    "overwritten": [put("a", ONE, 0), put("b", TWO, 2), get("b", TWO, 4)],
    "deleted and created": [
        put("a", ONE, 0),
        did("delete", None, 2, version=TWO, existed=True),
        did("delete", None, 4, version=ABSENT, existed=False),
        put("b", THREE, 6, expected=NOTHING),
        get("b", THREE, 8),
    ],
    "a refusal says what it has found": [
        put("a", ONE, 0),
        put("b", TWO, 2, expected=A),
        put("c", TWO, 4, expected=A, outcome="refused"),
        put("d", ONE, 1.5, expected=NOTHING, outcome="refused"),
        get("b", TWO, 6),
    ],
    "a refusal that says nothing": [
        put("a", ONE, 0),
        put("c", None, 2, expected=NOTHING, outcome="refused"),
        get("a", ONE, 4),
    ],
    "lost, and done later": [
        put("a", ONE, 0),
        lost("put", "b", 1),
        get("a", ONE, 2),
        get("b", TWO, 4),
    ],
    "lost, and never done": [put("a", ONE, 0), lost("delete", None, 1), get("a", ONE, 5)],
    "old by less than it may be": [
        put("a", ONE, 0),
        put("b", TWO, 2),
        get("a", ONE, 3.5, may_be_old=True),
        get("b", TWO, 5),
    ],
}

WRONG: dict[str, tuple[str, list[Did]]] = {
    "a put that happened again": (
        "happened twice",
        [put("a", ONE, 0), put("b", TWO, 2), get("a", THREE, 4)],
    ),
    "two values of one version": (
        "is the version of a too",
        [put("a", ONE, 0), put("b", ONE, 0.5), get("b", ONE, 2)],
    ),
    "two that compared with one version": (
        "both succeeded",
        [put("a", ONE, 0), put("b", TWO, 2, expected=A), put("c", THREE, 2, expected=A)],
    ),
    "a compared put and a compared delete": (
        "both succeeded",
        [
            put("a", ONE, 0),
            put("b", TWO, 2, expected=A),
            did("delete", None, 2, version=THREE, expected=A, existed=True),
        ],
    ),
    "a write with an earlier version": (
        "versions do not rise",
        [put("a", TWO, 0), put("b", ONE, 2), get("b", ONE, 4)],
    ),
    "a read of an earlier version": (
        "versions do not rise",
        [put("a", ONE, 0), put("b", TWO, 2), get("a", ONE, 4)],
    ),
    "a refusal by an earlier version": (
        "versions do not rise",
        [put("a", ONE, 0), put("b", TWO, 2), put("c", ONE, 4, expected=NOTHING, outcome="refused")],
    ),
    "a read of what was overwritten": (
        "not linearizable",
        [put("a", ONE, 0), put("b", TWO, 2), get("a", ONE, 4)],
    ),
    "a read of nothing after a put": ("not linearizable", [put("a", ONE, 0), get(None, ABSENT, 2)]),
    "a delete that found nothing after a put": (
        "not linearizable",
        [put("a", ONE, 0), did("delete", None, 2, version=ABSENT, existed=False)],
    ),
    "a value that nobody wrote": ("not linearizable", [get("a", ONE, 0)]),
    "older than it may be": (
        "not linearizable",
        [put("a", ONE, 0), put("b", TWO, 2), get("a", ONE, 4.5, may_be_old=True)],
    ),
}


@pytest.mark.parametrize("history", RIGHT.values(), ids=list(RIGHT))
def test_what_is_right(history: list[Did]) -> None:
    last = history[-1]
    final = NOTHING if last.value is None else Seen(last.value, last.version or ABSENT)
    assert judge(history, {"k": final}, {"rest": 1.0}) == []


@pytest.mark.parametrize(("words", "history"), WRONG.values(), ids=list(WRONG))
def test_what_is_wrong(words: str, history: list[Did]) -> None:
    heard = judge(history)
    assert any(words in said for said in heard), heard


def test_an_acknowledged_put_is_there_in_the_end() -> None:
    history = [put("a", ONE, 0), put("b", TWO, 2)]
    assert judge(history, {"k": Seen("b", TWO)}) == []
    assert judge(history, {"k": Seen("c", THREE)}) == []
    assert "what is there is older" in judge(history, {"k": A})[0]
    assert "another value has its version" in judge(history, {"k": Seen("c", TWO)})[0]
    (first, second) = judge(history, {})
    assert "nobody deleted it" in first
    assert "nobody deleted it" in second
    assert judge([*history, lost("delete", None, 4)], {}) == []
    gone = did("delete", None, 4, version=THREE, existed=True)
    assert judge([*history, gone], {}) == []


def test_an_operation_that_takes_too_long() -> None:
    history = [put("a", ONE, 0, took=7.0)]
    assert judge(history, None, {"rest": 8.0, "rpc": 1.0}) == []
    assert "it took 7.0 s, and may take 6" in judge(history, None, {"rest": 6.0})[0]
