"""`bench engines`: the engines that are servers, each against a bare loop and its peers."""

from __future__ import annotations

from collections.abc import Callable

from bench import jetstream, joins, postgres, postgres_queues, valkey
from bench.harness import Options, Say, Section

PARTS: dict[str, Callable[[Options, Say], Section]] = {
    **postgres.PARTS,
    **postgres_queues.PARTS,
    **joins.PARTS,
    **jetstream.PARTS,
    **valkey.PARTS,
}
