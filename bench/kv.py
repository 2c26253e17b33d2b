"""`bench kv`: keys and values, embedded, each engine against its own bare commit and read."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import psycopg

import engines
import pxrs
from bench import ours, postgres
from bench.harness import Check, Contestant, Options, Sample, Say, Section, compare
from bench.ours import Px
from pxrs.stores.etcd.wire import grpc, rpc

_THREADS = 16
_KEYS = 100
_VALUE = b"x" * 100
_PUT_BARE, _GET_BARE = "bare commit, one thread", "bare read, one thread"
_PUT_ONE, _GET_ONE = "put, one thread", "get, one thread"
_PUT_MANY, _GET_MANY = f"put, {_THREADS} threads", f"get, {_THREADS} threads"


class Bare(NamedTuple):
    """One connection of the engine's own client: a durable commit of one row, and a read of it."""

    put: Callable[[str], object]
    get: Callable[[str], object]


class Place(NamedTuple):
    """An engine: how it is reached bare, and as a store.

    `gets` is the target of gets: where no server has to be asked, a bare read takes microseconds.
    """

    name: str
    gets: float
    bare: Callable[[Path], AbstractContextManager[Bare]]
    store: Callable[[Path], AbstractContextManager[Px]]


@contextmanager
def _sqlite_bare(folder: Path) -> Iterator[Bare]:
    file = folder / "bare.db"
    with closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("CREATE TABLE bare (key TEXT PRIMARY KEY, value BLOB)")
        yield Bare(
            lambda key: db.execute("INSERT OR REPLACE INTO bare VALUES (?, ?)", (key, _VALUE)),
            lambda key: db.execute("SELECT value FROM bare WHERE key = ?", (key,)).fetchone(),
        )


@contextmanager
def _sqlite_store(folder: Path) -> Iterator[Px]:
    with pxrs.connect(ours.url(folder)) as px:
        yield px


@contextmanager
def _sqlite() -> Iterator[Place]:
    yield Place("SQLite", 0.1, _sqlite_bare, _sqlite_store)


@contextmanager
def _postgres() -> Iterator[Place]:
    """Each contestant has a new database."""
    upsert = "INSERT INTO bare VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = %s"

    @contextmanager
    def bare(folder: Path) -> Iterator[Bare]:
        with (
            postgres.database(server) as url,
            psycopg.connect(url, autocommit=True) as db,
        ):
            db.execute("CREATE TABLE bare (key text PRIMARY KEY, value bytea)")
            yield Bare(
                lambda key: db.execute(upsert, (key, _VALUE, _VALUE), prepare=True),
                lambda key: db.execute(
                    "SELECT value FROM bare WHERE key = %s", (key,), prepare=True
                ).fetchone(),
            )

    @contextmanager
    def store(folder: Path) -> Iterator[Px]:
        with postgres.database(server) as url, pxrs.connect(url) as px:
            yield px

    with postgres.server() as server:
        yield Place("PostgreSQL", 0.5, bare, store)


@contextmanager
def _etcd() -> Iterator[Place]:
    """One node, with fsync; keys that are there already are written again."""

    @contextmanager
    def bare(folder: Path) -> Iterator[Bare]:
        with grpc.insecure_channel(engine.url.removeprefix("etcd://")) as channel:
            stub = rpc.KVStub(channel)
            yield Bare(
                lambda key: stub.Put(rpc.PutRequest(key=key.encode(), value=_VALUE)),
                lambda key: stub.Range(rpc.RangeRequest(key=key.encode())),
            )

    @contextmanager
    def store(folder: Path) -> Iterator[Px]:
        with pxrs.connect(engine.url) as px:
            yield px

    with engines.start("etcd", durable=True) as engine:
        yield Place("etcd", 0.5, bare, store)


def _repeat(call: Callable[[str], object], threads: int, each: int) -> Sample:
    """Has each thread call with keys of its own, in turn, until it has done so many calls."""

    def work(name: int) -> None:
        for number in range(each):
            call(f"{name}-{number % _KEYS}")

    with ThreadPoolExecutor(threads) as pool:
        began = perf_counter()
        for worker in [pool.submit(work, name) for name in range(threads)]:
            worker.result()
        return Sample(threads * each, perf_counter() - began)


def _measured(
    opened: Callable[[Path], AbstractContextManager[Bare]],
    threads: int,
    calls: int,
    folder: Path,
    *,
    reads: bool,
) -> Sample:
    """Puts every key once, which does not count, so that all are there; then puts or gets them."""
    each = max(1, calls // threads)
    with opened(folder) as place:
        _repeat(place.put, threads, min(each, _KEYS))
        return _repeat(place.get if reads else place.put, threads, each)


@contextmanager
def _keys(place: Place, folder: Path) -> Iterator[Bare]:
    with place.store(folder) as px:
        yield Bare(lambda key: px.kv.put(key, _VALUE), px.kv.get)


def _engine(
    start: Callable[[], AbstractContextManager[Place]], options: Options, say: Say
) -> Section:
    """Durable puts and gets, by one thread and by 16."""
    puts, gets = (320, 960) if options.quick else (3200, 16_000)
    with start() as place:
        ours_ = partial(_keys, place)
        put, get = (
            compare(
                f"{what} on {place.name}",
                [
                    Contestant(names[0], partial(_measured, place.bare, 1, calls, reads=reads)),
                    Contestant(names[1], partial(_measured, ours_, 1, calls, reads=reads)),
                    Contestant(names[2], partial(_measured, ours_, _THREADS, calls, reads=reads)),
                ],
                options.rounds,
                options,
                say,
            )
            for what, names, calls, reads in (
                ("put of keys", (_PUT_BARE, _PUT_ONE, _PUT_MANY), puts, False),
                ("get of keys", (_GET_BARE, _GET_ONE, _GET_MANY), gets, True),
            )
        )
    checks = [
        Check(f"{place.name}: {mine} ÷ bare", found.ratio(mine, bare), target, "", "at least")
        for found, mine, bare, target in (
            (put, _PUT_ONE, _PUT_BARE, 0.25),
            (put, _PUT_MANY, _PUT_BARE, 1.0),
            (get, _GET_ONE, _GET_BARE, place.gets),
            (get, _GET_MANY, _GET_BARE, place.gets),
        )
    ]
    return Section([put, get], checks)


PARTS: dict[str, Callable[[Options, Say], Section]] = {
    "sqlite": partial(_engine, _sqlite),
    "postgres": partial(_engine, _postgres),
    "etcd": partial(_engine, _etcd),
}
