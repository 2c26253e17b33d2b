"""Where consumers enter what they have handled: a table of the store, or files beside it.

The table is written in the transaction that commits the checkpoint. Where the store can't do
that each consumer writes a file of its own, before it commits: at least once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from pxrs.app import Pxrs
from pxrs.cli.demo.script import Entry
from pxrs.consuming.consumer import Consumer
from pxrs.errors import Fenced, InvalidRequest, NotAtomic


class Ledger(Protocol):
    """Entries, and how they relate to the checkpoint."""

    @property
    def address(self) -> str:
        """Where it is, for the other processes: see `open_ledger`."""
        ...

    @property
    def once(self) -> bool:
        """Whether every message has to be there exactly once."""
        ...

    def enter(self, consumer: Consumer, entries: list[Entry]) -> bool:
        """Enter a batch and commit its checkpoint; false if that was refused."""
        ...

    def entries(self) -> list[Entry]: ...

    def remove(self) -> None: ...


def make_ledger(px: Pxrs, name: str, folder: str, *, transactions: bool) -> Ledger:
    """A new ledger: a table if the store's transactions can hold one."""
    if transactions:
        table = Table(px, name)
        try:
            table.make()
        except NotAtomic:
            pass
        else:
            return table
    return Files(Path(folder))


def open_ledger(px: Pxrs, address: str) -> Ledger:
    """The ledger that another process has made."""
    kind, _, where = address.partition(":")
    return Table(px, where) if kind == "table" else Files(Path(where))


class Table:
    """A table in the store's own database. Whole numbers only: the same SQL everywhere."""

    once = True

    def __init__(self, px: Pxrs, name: str) -> None:
        self._px = px
        self._name = name
        self.address = f"table:{name}"

    def make(self) -> None:
        columns = ", ".join(f"{field}_ BIGINT" for field in Entry._fields)
        self._execute(f"CREATE TABLE {self._name} ({columns})")

    def enter(self, consumer: Consumer, entries: list[Entry]) -> bool:
        rows = ",".join(f"({','.join(map(str, entry))})" for entry in entries)
        try:
            with consumer.transaction() as tx:
                tx.execute(f"INSERT INTO {self._name} VALUES {rows}")
        except Fenced:
            return False
        return True

    def entries(self) -> list[Entry]:
        with self._px.stores.atomic() as atomic:
            rows = atomic.connection.execute(f"SELECT * FROM {self._name}").fetchall()
        return [Entry(*row) for row in rows]

    def remove(self) -> None:
        self._execute(f"DROP TABLE {self._name}")

    def _execute(self, statement: str) -> None:
        """Make or remove the table. MariaDB commits that by itself, and the block complains."""
        done = False
        try:
            with self._px.stores.atomic() as atomic:
                if atomic.connection is None:
                    raise NotAtomic("the store has no tables")
                atomic.connection.execute(statement)
                done = True
        except InvalidRequest:
            if not done:
                raise


class Files:
    """A file for each consumer."""

    once = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = f"files:{folder}"

    def enter(self, consumer: Consumer, entries: list[Entry]) -> bool:
        # One write, so that a kill leaves a batch whole or not at all.
        self._append(f"{os.getpid()}.ledger", entries)
        try:
            consumer.commit()
        except Fenced:
            return False
        return True

    def entries(self) -> list[Entry]:
        return [
            Entry(*map(int, line.split(",")))
            for path in sorted(self._folder.glob("*.ledger"))
            for line in path.read_text().splitlines()
        ]

    def remove(self) -> None:
        for path in self._folder.glob("*.ledger"):
            path.unlink()

    def _append(self, name: str, entries: Iterable[Entry]) -> None:
        text = "".join(f"{','.join(map(str, entry))}\n" for entry in entries)
        fd = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
