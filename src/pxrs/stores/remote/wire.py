"""The messages of `pxrs.v1`: calls of the seams in `pxrs.stores.api`.

The types of a method's arguments and result are read off the seam itself: there is one truth.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol, get_args, get_origin, get_type_hints

import msgspec

from pxrs import types
from pxrs.client.frames import MOST_ENTRIES, Method, WireError, pack_error, unpack_error
from pxrs.client.topology import NodesView
from pxrs.core.error_text import storable
from pxrs.core.kv import Change, Written
from pxrs.errors import PxrsError
from pxrs.stores.api import CoordStore, ItemRestorer, LogStore, QueueStore, TellsTime
from pxrs.types import (
    ABSENT,
    Append,
    Appended,
    Check,
    Committed,
    Conflict,
    Delete,
    Entry,
    Held,
    Holder,
    NewItem,
    Put,
    QueueChange,
    StoredItem,
    Versioned,
    Write,
)


class WireWrite(NamedTuple):
    """A `Put`, or a `Delete` if it has no value."""

    key: str
    value: bytes | None
    session: str | None = None


class WireWritten(NamedTuple):
    """The outcome of one write of a batch."""

    written: Written | None
    error: WireError | None


class WireAppended(NamedTuple):
    """The outcome of one batch."""

    appended: Appended | None
    error: WireError | None


# Methods


def _method(
    name: str,
    function: Callable[..., Any],
    *,
    repeatable: bool,
    takes: Mapping[str, Any] | None = None,
    returns: Any = None,
    **packing: Any,
) -> Method:
    hints = get_type_hints(function, {**vars(types), **function.__globals__})
    hints |= takes or {}
    signature = inspect.signature(function).parameters
    parameters = tuple(it for it in signature if it != "self")
    defaults = {
        it: signature[it].default
        for it in parameters
        if signature[it].default is not inspect.Parameter.empty
    }
    kinds = tuple(_bounded(hints[it]) for it in parameters)
    arguments: Any = msgspec.msgpack.Decoder(tuple[kinds] if kinds else tuple[()])  # type: ignore[valid-type]
    answer: Any = msgspec.msgpack.Decoder(hints["return"] if returns is None else returns)
    return Method(name, parameters, defaults, arguments, answer, repeatable, **packing)


def _bounded(hint: Any) -> Any:
    """The type, limited to `MOST_ENTRIES` entries if it is a sequence."""
    if get_origin(hint) not in (list, Sequence):
        return hint
    return Annotated[list[get_args(hint)[0]], msgspec.Meta(max_length=MOST_ENTRIES)]  # type: ignore[misc]


class WireChange(msgspec.Struct, frozen=True):
    """A `QueueChange` with at most as many entries as a node takes."""

    holder: Holder
    remove: Annotated[tuple[Held, ...], msgspec.Meta(max_length=MOST_ENTRIES)] = ()
    put: Annotated[tuple[NewItem, ...], msgspec.Meta(max_length=MOST_ENTRIES)] = ()
    unit: str = ""
    forget: Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_ENTRIES)] = ()

    def unpacked(self) -> QueueChange:
        return QueueChange(self.holder, self.remove, self.put, self.unit, self.forget)


class Records(NamedTuple):
    """Records of a list. `is_cut`: there are more; ask for them with `after` the last one."""

    found: list[Versioned]
    is_cut: bool


class Items(NamedTuple):
    """Items of a peek, likewise."""

    found: list[StoredItem]
    is_cut: bool


def pack_writes(writes: Sequence[Write]) -> list[WireWrite]:
    return [
        WireWrite(it.key, bytes(it.value), it.session)
        if isinstance(it, Put)
        else WireWrite(it.key, None)
        for it in writes
    ]


def unpack_writes(sent: Sequence[WireWrite]) -> list[Write]:
    return [
        Delete(it.key) if it.value is None else Put(it.key, it.value, it.session) for it in sent
    ]


def _pack_outcome(outcome: Committed | Conflict) -> tuple[bool, Any]:
    if isinstance(outcome, Committed):
        return True, outcome.versions
    return False, outcome.current


class _WireOutcome(NamedTuple):
    committed: bool
    records: dict[str, int | Versioned | None]


def _unpack_outcome(sent: _WireOutcome) -> Committed | Conflict:
    records: Any = sent.records
    return Committed(records) if sent.committed else Conflict(records)


def _pack_appended(outcomes: Sequence[Appended | PxrsError]) -> list[WireAppended]:
    return [
        WireAppended(None, pack_error(it)) if isinstance(it, PxrsError) else WireAppended(it, None)
        for it in outcomes
    ]


def _pack_written(answers: Sequence[Written | PxrsError]) -> list[WireWritten]:
    return [
        WireWritten(None, pack_error(it)) if isinstance(it, PxrsError) else WireWritten(it, None)
        for it in answers
    ]


def _unpack_written(sent: Sequence[WireWritten]) -> list[Written | PxrsError]:
    return [
        unpack_error(it.error) if it.error is not None else it.written or Written(ABSENT)
        for it in sent
    ]


def _unpack_appended(sent: Sequence[WireAppended]) -> list[Appended | PxrsError]:
    return [
        unpack_error(it.error) if it.error is not None else it.appended or Appended(0)
        for it in sent
    ]


# Calls of the node itself: sessions and watches that it holds for the client, and commits of
# several stores. They are protocols like the seams, so that their types can be read the same way.


class NodeCalls(Protocol):
    """Calls that are not methods of a store."""

    def open_session(self, ttl: float) -> str: ...

    def renew_session(self, session: str) -> None: ...

    def close_session(self, session: str) -> None: ...

    def watch_records(self, watch: int, where: list[str]) -> None: ...

    def watch_log(self, watch: int, where: list[types.LogPartition]) -> None: ...

    def watch_queues(self, watch: int, where: list[str]) -> None: ...

    def unwatch(self, watch: int) -> None: ...

    def view(self) -> NodesView: ...

    def watch_view(self, watch: int) -> None: ...

    def atomic(
        self,
        checks: list[Check],
        writes: list[WireWrite],
        appends: list[Append],
        change: WireChange | None,
    ) -> WireAtomic: ...


class KeyCalls(Protocol):
    """Keys and values, on the node that leads them."""

    def write(
        self, writer: str, number: int, changes: list[Change], again: bool
    ) -> list[Written | PxrsError]:
        """Writes a batch; see `pxrs.core.kv.Writer`."""

    def read(self, keys: list[bytes]) -> list[Entry | None]:
        """Reads the first of these keys, as many as fit into an answer."""


class WireAtomic(NamedTuple):
    """The results of a commit of several stores."""

    versions: dict[str, int]
    appended: list[Appended]
    queued: list[int | None]


def _of(seam: type, folder: str, once: str, again: str, odd: Mapping[str, Any]) -> list[Method]:
    """The methods of a seam: those that must be called once, and those that may be repeated."""
    return [
        _method(
            f"{folder}.{name}",
            getattr(seam, name),
            repeatable=name in again.split(),
            **odd.get(name, {}),
        )
        for name in f"{once} {again}".split()
    ]


_COMMIT = {
    "takes": {"writes": list[WireWrite]},
    "returns": _WireOutcome,
    "pack": lambda values: (values[0], pack_writes(values[1])),
    "unpack": lambda values: (values[0], unpack_writes(values[1])),
    "pack_answer": _pack_outcome,
    "unpack_answer": _unpack_outcome,
}
_APPEND = {
    "returns": list[WireAppended],
    "pack_answer": _pack_appended,
    "unpack_answer": _unpack_appended,
}
_WRITE = {
    "returns": list[WireWritten],
    "pack_answer": _pack_written,
    "unpack_answer": _unpack_written,
}
_APPLY = {
    "takes": {"change": WireChange},
    "unpack": lambda values: [values[0].unpacked()],
}
_RELEASE = {
    # Errors come from handlers and may be any text.
    "pack": lambda values: (
        values[0],
        [it._replace(error=storable(it.error)) for it in values[1]],
    ),
}
METHODS: dict[str, Method] = {
    method.name: method
    for method in [
        *_of(
            CoordStore,
            "coord",
            "commit",
            "get list",
            {"commit": _COMMIT, "list": {"returns": Records}},
        ),
        *_of(TellsTime, "coord", "", "now_ms", {}),
        *_of(
            LogStore,
            "log",
            "append",
            "create drop fetch bounds size batch_at trim expire",
            {"append": _APPEND},
        ),
        *_of(
            QueueStore,
            "queues",
            "take apply redrive purge drop delete",
            "create find all held extend outcome release reap stats peek",
            {"release": _RELEASE, "apply": _APPLY, "peek": {"returns": Items}},
        ),
        *_of(ItemRestorer, "queues", "", "restore", {}),
        *_of(
            NodeCalls,
            "node",
            "atomic",
            "open_session renew_session close_session watch_records watch_log watch_queues unwatch "
            "view watch_view",
            {},
        ),
        *_of(KeyCalls, "kv", "", "read write", {"write": _WRITE}),
    ]
}
