"""What pxrs writes in the caller's transaction lands when, and only if, the caller commits.

Idiom by engine by ending: afterwards the caller's row, the item and the message are all there,
or none of them is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from sqlalchemy import text

from support.callers import (
    IDIOMS,
    SQLITE_AUTOCOMMIT,
    ChangedMindError,
    Idiom,
    Site,
    engine_begin,
    site_of,
)
from support.child import PATIENCE

MATRIX = [
    pytest.param(kind, idiom, id=f"{kind}-{idiom.__name__}", marks=pytest.mark.engine(kind))
    for kind, idioms in IDIOMS.items()
    for idiom in (
        *idioms,
        *(SQLITE_AUTOCOMMIT if kind == "sqlite" and sys.version_info >= (3, 12) else ()),
    )
]
every_idiom = pytest.mark.parametrize(("kind", "idiom"), MATRIX)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Site]]:
    made: dict[str, Site] = {}
    with ExitStack() as opened:

        def of(kind: str) -> Site:
            if kind not in made:
                made[kind] = opened.enter_context(site_of(kind, tmp_path_factory.mktemp(kind)))
            return made[kind]

        yield of


@pytest.fixture
def site(kind: str, sites: Callable[[str], Site]) -> Site:
    site = sites(kind)
    site.renew()
    return site


@every_idiom
@pytest.mark.parametrize("first", ["row", "item"])
def test_the_callers_commit_lands_both(site: Site, idiom: Idiom, first: str) -> None:
    with idiom(site) as caller:
        if first == "row":
            caller.insert(1)
        site.write(caller, 1)
        if first == "item":
            caller.insert(1)
        site.write(caller, 2)
        caller.insert(2)
        assert site.landed() == site.both()
    assert site.landed() == site.both(1, 2)


@every_idiom
@pytest.mark.parametrize("first", ["row", "item"])
def test_the_callers_rollback_lands_neither(site: Site, idiom: Idiom, first: str) -> None:
    with pytest.raises(ChangedMindError), idiom(site) as caller:
        if first == "row":
            caller.insert(1)
        site.write(caller, 1)
        if first == "item":
            caller.insert(1)
        raise ChangedMindError
    assert site.landed() == site.both()


@every_idiom
def test_a_savepoint_rolled_back_takes_both_along(site: Site, idiom: Idiom) -> None:
    with idiom(site) as caller:
        caller.insert(1)
        site.write(caller, 1)
        with suppress(ChangedMindError), caller.nested():
            site.write(caller, 2)
            caller.insert(2)
            raise ChangedMindError
        with caller.nested():
            site.write(caller, 3)
            caller.insert(3)
    assert site.landed() == site.both(1, 3)


@every_idiom
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_connection_that_is_lost_lands_neither(site: Site, idiom: Idiom, when: str) -> None:
    with pytest.raises(Exception) as caught, idiom(site) as caller:  # noqa: PT011 - the driver's own, or ours
        caller.insert(1)
        if when == "after":
            site.write(caller, 1)
        site.cut(caller.driver())
        if when == "before":
            site.write(caller, 1)
    assert not isinstance(caught.value, AssertionError)
    assert site.landed() == site.both()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.engine(kind)) for kind in ("postgres", "mariadb")]
)
def test_who_has_not_committed_yet_holds_up_no_other_queue(site: Site) -> None:
    """Not even what the same process does next: what it notes of its own commits is apart."""
    beside = f"{site.name}-beside"
    site.px.queues.create(beside)
    site.px.put(beside, "0")
    for ends in (True, False):
        with suppress(ChangedMindError), engine_begin(site) as caller:
            site.write(caller, 1)
            for number in range(3):
                site.px.put(beside, str(number))
                with site.px.transaction() as tx:
                    assert tx.take(beside, PATIENCE) is not None
            if not ends:
                raise ChangedMindError
        site.px.put(beside, "9")
    assert len(site.px.stores.queues.peek(site.name)) == 1
    assert len(site.px.stores.queues.peek(beside)) == 3


NOTED = {
    "sqlite": "pxrs_queue_units WHERE session",
    "postgres": "pxrs.pxrs_queue_commits WHERE session",
    "mariadb": "pxrs_queue_commits WHERE session_id",
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.engine(kind)) for kind in NOTED]
)
def test_nothing_is_noted_of_what_callers_commit(site: Site) -> None:
    """However long their transactions last: nobody will ask what became of them."""
    hold_session = site.px._context().hold_session
    session = hold_session.session().id

    def noted() -> int:
        with site.engine.connect() as connection:
            count = text(f"SELECT count(*) FROM {NOTED[site.kind]} = :session")
            return int(connection.execute(count, {"session": session}).scalar_one())

    site.px.put(site.name, "taken")
    before = noted()
    for number in range(3):
        with engine_begin(site) as caller:
            site.px.put(site.name, str(number), connection=caller.connection)
    with engine_begin(site) as caller, site.px.transaction(join=caller.connection) as tx:
        assert tx.take(site.name, PATIENCE) is not None
        tx.put(site.name, "more")
    assert noted() == before
    found = site.px.queues.describe(site.name)
    assert (found.put, found.depth) == (5, 4)
