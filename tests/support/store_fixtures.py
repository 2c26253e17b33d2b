"""A connected store for every test, on each engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs import Pxrs
from pxrs.stores.open import open_stores
from support.faults import FaultyLog, FaultyStores

_ENGINES = [pytest.param(name, marks=pytest.mark.engine(name)) for name in ("memory", "sqlite")]


@pytest.fixture(params=_ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store of its own; with `--remote`, behind a node."""
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/store.db"
    if not request.config.getoption("--remote"):
        yield url
        return
    from support.remote_lab import ServedStores

    served = ServedStores(open_stores(url))
    yield f"pxrs://127.0.0.1:{served.port}"
    served.close()


@pytest.fixture(params=[*_ENGINES, pytest.param("postgres", marks=pytest.mark.engine("postgres"))])
def engine_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """As `url`, and a database of PostgreSQL's."""
    if request.param == "postgres":
        found: str = request.getfixturevalue("postgres_url")
        return found
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
def px(url: str) -> Iterator[Pxrs]:
    with pxrs.connect(url) as px:
        yield px


@pytest.fixture
def stores(url: str) -> FaultyStores:
    return FaultyStores(open_stores(url))


@pytest.fixture
def log(stores: FaultyStores) -> FaultyLog:
    return stores.log


@pytest.fixture
def faulty(stores: FaultyStores) -> Iterator[Pxrs]:
    """A connected store whose log fails when `log` says so."""
    with Pxrs(stores) as px:
        yield px
        stores.log.heal()
