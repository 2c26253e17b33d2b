"""Findings of an examination of a store. Each engine contributes a list of them."""

from __future__ import annotations

import enum

import msgspec


class Level(enum.StrEnum):
    """The severity: `WARNING` may cost data or time one day, `PROBLEM` does not work."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One finding: `says` describes it in plain words; `mend` is what to do about it, if any."""

    check: str
    level: Level
    says: str
    mend: str = ""


def ok(check: str, says: str) -> Finding:
    return Finding(check, Level.OK, says)


def note(check: str, says: str, mend: str = "") -> Finding:
    return Finding(check, Level.NOTE, says, mend)


def warning(check: str, says: str, mend: str) -> Finding:
    return Finding(check, Level.WARNING, says, mend)


def problem(check: str, says: str, mend: str) -> Finding:
    return Finding(check, Level.PROBLEM, says, mend)


def judge_clock(ahead: float) -> Finding:
    """Judges the engine's clock, which is `ahead` seconds ahead of this machine's."""
    if abs(ahead) < 1.0:
        return ok("clock", f"the store's clock is {ahead * 1000:+.0f} ms from this machine's")
    return warning(
        "clock",
        f"the store's clock is {ahead:+.1f} s from this machine's. Leases are safe, they are "
        "judged by the store; timestamps, retention and delays are not what they seem",
        "let both machines keep time with NTP",
    )
