"""The writers to a table in MySQL or MariaDB, which may have ids of rows not visible yet.

An insert takes its id from the table's counter *before* InnoDB begins a transaction for it, so
a list of transactions alone is not enough. Neither is `INNODB_TRX`: the server fills that view anew
only if it was not read for 100 ms, so two clients that read it often see the same old answer for
ever.

What is used instead is live:

- MySQL: `performance_schema.metadata_locks`. A statement locks the table's name before it takes an
  id, and the lock is kept until its transaction has ended.
- MariaDB has those switched off. There it is the list of running statements, then the transactions
  in `SHOW ENGINE INNODB STATUS`, in this order, see `TransactionsAndStatements`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from pxrs.sources.tables.api import Record

Rows = Callable[..., list[Record]]

# Locks of writers; readers have SHARED_READ.
_LOCKS = """
SELECT OWNER_THREAD_ID, OWNER_EVENT_ID, OBJECT_INSTANCE_BEGIN
FROM performance_schema.metadata_locks
WHERE OBJECT_TYPE = 'TABLE' AND LOCK_STATUS = 'GRANTED' AND LOCK_TYPE IN ('SHARED_WRITE',
    'SHARED_WRITE_LOW_PRIO', 'SHARED_UPGRADABLE', 'SHARED_NO_WRITE', 'SHARED_NO_READ_WRITE',
    'EXCLUSIVE')
"""
_ARE_KEPT = """
SELECT count(*) FROM performance_schema.setup_instruments, performance_schema.setup_consumers c
WHERE setup_instruments.NAME = 'wait/lock/metadata/sql/mdl' AND setup_instruments.ENABLED = 'YES'
    AND c.NAME = 'global_instrumentation' AND c.ENABLED = 'YES'
"""
# Whether ids are given on another server: a replica may be written to, read_only or not.
_COPIES = """
SELECT count(*) FROM performance_schema.replication_applier_status
WHERE SERVICE_STATE = 'ON' AND CHANNEL_NAME NOT LIKE 'group_replication%%'
"""
_LOST = """
SHOW GLOBAL STATUS WHERE Variable_name IN
    ('Performance_schema_metadata_lock_lost', 'Performance_schema_thread_instances_lost')
"""
_STATEMENTS = """
SELECT ID, QUERY_ID, COMMAND FROM information_schema.PROCESSLIST
WHERE ID <> CONNECTION_ID() AND COMMAND NOT IN ('Sleep', 'Binlog Dump')
    AND NOT (COMMAND = 'Daemon' AND USER IN ('event_scheduler', 'system user'))
"""
_LIST = "LIST OF TRANSACTIONS FOR EACH SESSION:\n"
_TRUNCATED = "... truncated..."
# Transactions that have written have a number, others an address.
_TRANSACTION = re.compile(r"(?P<id>\d+), (?P<state>.*)")
_CONNECTION = re.compile(r"^\w+ thread id (\d+), OS thread handle", re.MULTILINE)


class ListTruncated(Exception):  # noqa: N818 - caught by those who look
    """More transactions are running than the server lists; it lists them again once some ended."""


class Writers(Protocol):
    """Finds out who is writing."""

    # The right that the user needs for it.
    right: str

    def look(self) -> frozenset[str] | None:
        """Everyone who is writing now; None if that can't be seen.

        Raises `ListTruncated` if it can't be seen for a moment.
        """
        ...


class MetadataLocks:
    """See `Writers`. For one table, or for all of them.

    The number of the event tells two transactions of a connection apart. Where statements are not
    counted, the second may be taken for the first: then it is waited for, too.
    """

    right = "SELECT ON performance_schema.*"

    def __init__(self, rows: Rows, table: tuple[str, str] | None) -> None:
        self._rows = rows
        self._table = table

    def look(self) -> frozenset[str] | None:
        if not self._rows(_ARE_KEPT)[0][0] or any(int(lost) for _, lost in self._rows(_LOST)):
            return None
        if self._rows(_COPIES)[0][0]:
            return None
        if self._table is None:
            found = self._rows(_LOCKS)
        else:
            found = self._rows(f"{_LOCKS} AND OBJECT_SCHEMA = %s AND OBJECT_NAME = %s", self._table)
        return frozenset("/".join(map(str, row)) for row in found)


class _Statement(NamedTuple):
    """A statement that had no transaction when it was seen first; what it has begun since.

    That is one transaction. There are several where it is one of those without a connection.
    """

    connection: int
    begun: frozenset[int]


class TransactionsAndStatements:
    """See `Writers`. For the whole server: MariaDB does not show which tables they write to.

    Statements are read first. A writer that has an id from before that is in a statement, or in a
    transaction that has written: then it is among the transactions, which are read later, or has
    ended. A statement that has no transaction yet is waited for, and so is the transaction that is
    found on its connection later. That may be the next one already; then it is waited for, too.

    XA PREPARE leaves a transaction its number, but once its connection has gone nothing tells
    whose it was. A statement that is missing, as is its connection's transaction, may have become
    any of those that have no connection at that look.

    A transaction that has written nothing and is not in a statement has no id.
    """

    right = "PROCESS"

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        # Statements that may have begun a transaction since they were seen.
        self._statements: dict[str, _Statement] = {}

    def look(self) -> frozenset[str] | None:
        running = self._rows(_STATEMENTS)
        text = str(self._rows("SHOW ENGINE INNODB STATUS")[0][2])
        if any(command.startswith("Slave") for _, _, command in running):
            # Ids are given on another server.
            return None
        if _TRUNCATED in text:
            raise ListTruncated
        if _LIST not in text:
            return None
        return self.seen(running, transactions_in(text))

    def seen(
        self, running: Iterable[Sequence[object]], transactions: dict[int, int | None]
    ) -> frozenset[str]:
        """All writers, from the running statements and the transactions by connection."""
        on_connection = {of: each for each, of in transactions.items() if of is not None}
        without = frozenset(each for each, of in transactions.items() if of is None)
        now = {f"statement {query}@{at}": int(str(at)) for at, query, *_ in running}
        kept: dict[str, _Statement] = {}
        for name, (connection, before) in self._statements.items():
            begun = before & transactions.keys()
            if not before and connection in on_connection:
                begun = frozenset([on_connection[connection]])
            elif not before and name not in now:
                begun = without
            if begun or (not before and name in now):
                kept[name] = _Statement(connection, begun)
        for name, connection in now.items():
            if name not in self._statements and connection not in on_connection:
                kept[name] = _Statement(connection, frozenset())
        self._statements = kept
        return frozenset([*(f"transaction {each}" for each in transactions), *kept])


def transactions_in(status: str) -> dict[int, int | None]:
    """The transactions that have written, with their connections, in InnoDB's status text.

    Statements are quoted in it, behind the lines that are looked for: a text made to look like a
    transaction adds one, and hides none.
    """
    found: dict[int, int | None] = {}
    for block in status.partition(_LIST)[2].split("---TRANSACTION ")[1:]:
        head = _TRANSACTION.match(block)
        if head is not None and not head["state"].startswith("not started"):
            connection = _CONNECTION.search(block)
            found.setdefault(int(head["id"]), None if connection is None else int(connection[1]))
    return found
