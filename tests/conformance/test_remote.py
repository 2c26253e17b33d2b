"""`pxrs://` is another engine: it passes the suites of the stores that its nodes serve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.testing.conformance import (
    Rule,
    atomic_checks,
    coord_checks,
    log_checks,
    queue_checks,
    restore_checks,
    wake_checks,
)
from support.remote_lab import RemoteLab

pytestmark = pytest.mark.long
ENGINES = [
    pytest.param(name, marks=pytest.mark.engine(name)) for name in ("memory", "sqlite", "postgres")
]


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[RemoteLab]:
    url = "memory://" if request.param == "memory" else None
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
    lab = RemoteLab(url, ttl=2.0 if request.param == "postgres" else 0.5)
    yield lab
    lab.close()


ALL = coord_checks() + log_checks() + queue_checks() + restore_checks() + atomic_checks()


@pytest.mark.parametrize("lab", ENGINES[:1], indirect=True)
@pytest.mark.parametrize("check", ALL, ids=lambda check: check.__name__)
def test_conforms(check: Rule, lab: RemoteLab) -> None:
    check(lab)


# The wire is the same for every engine: what depends on the one behind it is checked each time.
ON_ENGINES = wake_checks() + atomic_checks()


@pytest.mark.parametrize("lab", ENGINES[1:], indirect=True)
@pytest.mark.parametrize("check", ON_ENGINES, ids=lambda check: check.__name__)
def test_another_engine_wakes_and_commits_as_well(check: Rule, lab: RemoteLab) -> None:
    check(lab)


@pytest.mark.thorough
@pytest.mark.parametrize("lab", ENGINES[1:], indirect=True)
@pytest.mark.parametrize(
    "check", [check for check in ALL if check not in ON_ENGINES], ids=lambda check: check.__name__
)
def test_another_engine_conforms(check: Rule, lab: RemoteLab) -> None:
    check(lab)
