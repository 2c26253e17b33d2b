"""The statements with which `prepare` makes a table in PostgreSQL cheaper to read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pxrs.sources.tables.api import mark_of, quoted_name

TRIGGER = "pxrs_notify"
_FUNCTION = "pxrs_notify_source"
# Keys whose text is the same for every connection: a generated column may depend on nothing else.
HASHED = (
    "text", "varchar", "bpchar", "citext", "int2", "int4", "int8", "numeric", "uuid", "bool",
    "bytea",
)  # fmt: skip


@dataclass(frozen=True)
class Statements:
    """Makes statements for one table, its partition column and its ids."""

    schema: str
    table: str
    partition: str
    offset: str

    @property
    def _name(self) -> str:
        return f"{_quoted(self.schema)}.{_quoted(self.table)}"

    @property
    def _short(self) -> str:
        """A name for things of this table: names have 63 bytes at most."""
        return hashlib.md5(self._name.encode(), usedforsecurity=False).hexdigest()[:16]

    @property
    def index_name(self) -> str:
        return f"pxrs_partition_{self._short}"

    @property
    def channel(self) -> str:
        return f"pxrs_source_{self._short}"

    def column(self, key: str, is_bytes: bool, partitions: int) -> str:
        """The partition of the key, as `core.routing.md5` computes it; 0 for rows without one."""
        comment = mark_of(key, partitions).replace("'", "''")
        return (
            f"ALTER TABLE {self._name} ADD COLUMN {_quoted(self.partition)} integer\n"
            f"    GENERATED ALWAYS AS ({partition_of(key, is_bytes, partitions)}) STORED;\n"
            f"COMMENT ON COLUMN {self._name}.{_quoted(self.partition)} IS '{comment}'"
        )

    def index(self, concurrently: bool) -> str:
        """The statement for the index, without stopping writers where PostgreSQL can do that."""
        how = "CONCURRENTLY " if concurrently else ""
        return (
            f"CREATE INDEX {how}{_quoted(self.index_name)} ON {self._name} "
            f"({_quoted(self.partition)}, {_quoted(self.offset)})"
        )

    def drop_index(self) -> str:
        return f"DROP INDEX {_quoted(self.schema)}.{_quoted(self.index_name)}"

    def function(self) -> str:
        return (
            f"CREATE OR REPLACE FUNCTION {_quoted(self.schema)}.{_FUNCTION}()\n"
            "    RETURNS trigger LANGUAGE plpgsql AS\n"
            "    $$ BEGIN PERFORM pg_notify(TG_ARGV[0], ''); RETURN NULL; END $$"
        )

    def trigger(self) -> str:
        return (
            f"CREATE TRIGGER {TRIGGER} AFTER INSERT ON {self._name} FOR EACH STATEMENT\n"
            f"    EXECUTE FUNCTION {_quoted(self.schema)}.{_FUNCTION}('{self.channel}')"
        )


def partition_of(key: str, is_bytes: bool, partitions: int) -> str:
    """An expression with the value of `core.routing.md5`."""
    text = _quoted(key) if is_bytes else f"{_quoted(key)}::text"
    number = f"('x' || substr(md5({text}), 1, 8))::bit(32)::bigint % {partitions}"
    return f"coalesce({number}, 0)::integer"


def _quoted(name: str) -> str:
    return quoted_name(name, '"')
