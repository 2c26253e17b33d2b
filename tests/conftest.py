"""What every test run shows at its end: how many tests ran on which engine."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

ENGINES = ("memory", "sqlite")
_PROPERTY = "engine"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("engine"):
            item.user_properties.append((_PROPERTY, mark.args[0]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            engines = [
                value for name, value in getattr(report, "user_properties", ()) if name == _PROPERTY
            ]
            for engine in engines or ["no engine"]:
                counts[str(engine)][outcome] += 1
    terminalreporter.section("tests per engine")
    for engine in (*ENGINES, "no engine"):
        words = [f"{number} {outcome}" for outcome, number in counts[engine].items()]
        terminalreporter.line(f"{engine:<12}{', '.join(words) or 'none ran'}")
