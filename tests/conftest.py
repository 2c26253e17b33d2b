"""What every test run shows at its end: how many tests ran on which engine."""

from __future__ import annotations

import gc
import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["support.engine_fixtures", "support.forked_workers", "support.store_fixtures"]

ENGINES = ("memory", "sqlite", "postgres", "mariadb", "etcd", "zookeeper", "nats", "valkey")
_PROPERTY = "engine"
# Fixtures that start a server.
_SERVERS = {
    "new_engine",
    "postgres_url",
    "bare_postgres_url",
    "mariadb_url",
    "etcd_url",
    "zookeeper_url",
    "nats_url",
    "valkey_url",
    "site",
}
# Folders and files of tests on servers, and folders of those that take long by nature: the fast
# part does not even load them, as every worker would for nothing.
_ON_SERVERS = {"postgres", "pgbouncer", "mysql", "sql", "etcd", "zookeeper", "jetstream"}
_NOT_FAST = {
    *(_ON_SERVERS | {"chaos", "simulator", "faults", "engines"}),
    *(f"test_{name}.py" for name in _ON_SERVERS),
}


# A shell ignores it for what it runs in the background, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="memory and SQLite only: no servers, nothing long"
    )
    parser.addoption(
        "--remote", action="store_true", help="stores of the fixture `url` are behind a node"
    )
    parser.addoption(
        "--fuzz",
        type=int,
        default=0,
        metavar="N",
        help="tests of bad input try N inputs each, others each time (tests/server)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A machine may be busy: no example has to be done by a deadline.
    examples = 25 if config.getoption("--fast") else 100
    settings.register_profile("pxrs", max_examples=examples, deadline=None)
    settings.load_profile("pxrs")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("--fast") and collection_path.name in _NOT_FAST:
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("engine"):
            item.user_properties.append((_PROPERTY, mark.args[0]))
    if config.getoption("--fast"):
        slow = [item for item in items if not _is_fast(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if _is_fast(item)]


def _is_fast(item: pytest.Item) -> bool:
    """Whether it needs no server and is not one of those that attack for long."""
    engines = {mark.args[0] for mark in item.iter_markers("engine")}
    fixtures = set(getattr(item, "fixturenames", ()))
    long = any(item.get_closest_marker(name) for name in ("long", "thorough"))
    return engines <= {"memory", "sqlite"} and not fixtures & _SERVERS and not long


def pytest_collection_finish() -> None:
    """Thousands of tests stay until the end: no collection of garbage has to go through them."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    suites: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            engines = [
                value for name, value in getattr(report, "user_properties", ()) if name == _PROPERTY
            ]
            for engine in engines or ["no engine"]:
                counts[str(engine)][outcome] += 1
                if outcome == "passed":
                    suites[str(engine)][_suite(report.nodeid)] += 1
    terminalreporter.section("tests per engine")
    for engine in (*ENGINES, "no engine"):
        words = [f"{number} {outcome}" for outcome, number in counts[engine].items()]
        terminalreporter.line(f"{engine:<12}{', '.join(words) or 'none ran'}")
    _write_suites(terminalreporter, suites)


def _write_suites(
    terminalreporter: pytest.TerminalReporter, suites: dict[str, Counter[str]]
) -> None:
    """Engine × suite: how many tests passed."""
    names = sorted({name for engine in ENGINES for name in suites.get(engine, ())})
    if not names:
        return
    widths = [max(len(name), 5) + 2 for name in names]
    head = "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    terminalreporter.line(f"\n{'passed':<12}{head}")
    for engine in ENGINES:
        row = [str(suites[engine][name] or "–") for name in names]
        cells = "".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        terminalreporter.line(f"{engine:<12}{cells}")


def _suite(nodeid: str) -> str:
    """A conformance suite by its own name, anything else by its folder."""
    parts = nodeid.split("/")
    return parts[1] if len(parts) > 2 else "other"
