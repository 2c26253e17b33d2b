"""The messages of `pxrs.v1`: calls of the seams, as they stand in `pxrs.stores.api`.

A client and a node share one stream of frames. A frame holds what was waiting: calls, each with
a number, the name of a method and its arguments; or answers, each with the call's number. Both are
MessagePack. What a method takes and returns is read off the seam itself: there is one truth, and
whatever does not fit its types is refused before anything is done with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, get_type_hints

import msgspec

from pxrs import errors, types
from pxrs.core.error_text import storable
from pxrs.errors import InvalidRequest, OutcomeUnknown, PxrsError, StoreUnavailable, quoted
from pxrs.stores.api import CoordStore, ItemRestorer, LogStore, QueueStore, TellsTime
from pxrs.types import (
    Append,
    Appended,
    Check,
    Committed,
    Conflict,
    Delete,
    Limits,
    Put,
    QueueChange,
    QueueLimits,
    TopicPartition,
    Version,
    Versioned,
    Write,
)

SERVICE = "pxrs.v1.Store"
CALL = "Call"
METHOD = f"/{SERVICE}/{CALL}"
# The first frame of a stream says who calls; it is answered like a call with this number.
HELLO = 0
ANSWER, ERROR, WOKEN = 0, 1, 2
# One call, its frame with what else was waiting, and the body of an item.
MOST_CALL_BYTES = 8 * 2**20
MOST_FRAME_BYTES = 2 * MOST_CALL_BYTES + 2**20
MOST_BODY_BYTES = 4 * 2**20


class Hello(msgspec.Struct, frozen=True):
    """What a node tells a client that has come."""

    node: str
    limits: Limits
    queue_limits: QueueLimits | None
    # What is there beyond the seams: "now", "atomic", "log", "queues", "restore".
    abilities: frozenset[str]


class WireWrite(NamedTuple):
    """A `Put`, or a `Delete` if it has no value."""

    key: str
    value: bytes | None
    session: str | None = None


class WireError(msgspec.Struct, frozen=True):
    """An error by the name of its class, with its text and attributes."""

    name: str
    text: str
    attributes: dict[str, Any] = {}


class WireAppended(NamedTuple):
    """What became of one batch."""

    appended: Appended | None
    error: WireError | None


class Method(NamedTuple):
    """One method of a seam on the wire.

    `repeatable`: a call whose answer was lost may be made again. `pack` turns arguments into what
    is sent, `unpack` turns that back; `pack_answer` and `unpack_answer` likewise.
    """

    name: str
    parameters: tuple[str, ...]
    defaults: Mapping[str, Any]
    arguments: msgspec.msgpack.Decoder[Any]
    answer: msgspec.msgpack.Decoder[Any]
    repeatable: bool
    pack: Callable[[list[Any]], Sequence[Any]] = list
    unpack: Callable[[Sequence[Any]], Sequence[Any]] = list
    pack_answer: Callable[[Any], Any] = lambda answer: answer
    unpack_answer: Callable[[Any], Any] = lambda answer: answer

    def bound(self, given: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """The arguments of a call, in the order of the seam."""
        if len(given) > len(self.parameters) or not named.keys() <= set(self.parameters):
            raise TypeError(f"{self.name} takes {', '.join(self.parameters)}")
        values = list(given)
        for parameter in self.parameters[len(given) :]:
            if parameter in named:
                values.append(named[parameter])
            elif parameter in self.defaults:
                values.append(self.defaults[parameter])
            else:
                raise TypeError(f"{self.name} needs {parameter}")
        return values

    def encode(self, values: list[Any]) -> msgspec.Raw:
        """The arguments as they are sent; raises `InvalidRequest` if they can't be."""
        packed = self.pack(values)
        try:
            try:
                sent = _raw(packed)
            except OverflowError:
                sent = _raw(_clamped(packed))
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(f"{self.name} can't send this: {error}") from None
        if len(memoryview(sent)) > MOST_CALL_BYTES:
            raise InvalidRequest(
                f"{self.name} has {len(memoryview(sent))} bytes; a pxrs:// store takes "
                f"{MOST_CALL_BYTES} at a time"
            )
        return sent

    def decode(self, sent: msgspec.Raw) -> dict[str, Any]:
        """The arguments by name; raises `InvalidRequest` if they do not fit."""
        try:
            values = self.arguments.decode(sent)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"{self.name} got wrong arguments: {error}") from None
        return dict(zip(self.parameters, self.unpack(values), strict=True))

    def encode_answer(self, answer: Any) -> msgspec.Raw:
        return _raw(self.pack_answer(answer))

    def decode_answer(self, sent: msgspec.Raw) -> Any:
        return self.unpack_answer(self.answer.decode(sent))


_ENCODER = msgspec.msgpack.Encoder()
_CALLS = msgspec.msgpack.Decoder(list[tuple[int, str, msgspec.Raw]])
_ANSWERS = msgspec.msgpack.Decoder(list[tuple[int, int, msgspec.Raw]])
_ERROR = msgspec.msgpack.Decoder(WireError)
NOTHING = msgspec.Raw(_ENCODER.encode(None))


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_ENCODER.encode(value))


def _clamped(value: Any) -> Any:
    """The same with numbers that fit into 64 bits: an id or a count beyond that is none."""
    if isinstance(value, bool | str | bytes | bytearray | float) or value is None:
        return value
    if isinstance(value, int):
        return max(-(2**63), min(value, 2**63 - 1))
    if isinstance(value, msgspec.Struct):
        return {name: _clamped(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: _clamped(it) for name, it in value.items()}
    return [_clamped(it) for it in value]


def encode_frame(entries: Sequence[tuple[int, str | int, msgspec.Raw]]) -> bytes:
    """Calls or answers as one frame."""
    return _ENCODER.encode(entries)


def decode_calls(frame: bytes) -> list[tuple[int, str, msgspec.Raw]]:
    """The calls of a frame; raises `InvalidRequest` if it is none."""
    try:
        return _CALLS.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"a frame can't be read: {error}") from None


def decode_answers(frame: bytes) -> list[tuple[int, int, msgspec.Raw]]:
    """The answers of a frame; raises `StoreUnavailable` if they can't be read."""
    try:
        return _ANSWERS.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreUnavailable(f"the node sent what can't be read: {error}") from None


# Errors

_CLASSES: dict[str, type[PxrsError]] = {
    name: found
    for name, found in vars(errors).items()
    if inspect.isclass(found) and issubclass(found, PxrsError)
}
_ATTRIBUTES: dict[tuple[str, str], Any] = {
    ("CommitConflict", "current"): dict[str, Versioned | None],
    ("VersionMismatch", "expected"): Version,
    ("VersionMismatch", "current"): Version | None,
    ("AlreadyExists", "current"): Version,
    ("Fenced", "parts"): frozenset[TopicPartition],
    ("Displaced", "parts"): frozenset[TopicPartition],
    ("GroupNotEmpty", "members"): tuple[str, ...],
}


def pack_error(error: PxrsError) -> WireError:
    """The error as it is sent."""
    known = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    attributes = msgspec.to_builtins(known, builtin_types=(bytes,), str_keys=True)
    return WireError(type(error).__name__, str(error), attributes)


def unpack_error(sent: WireError) -> PxrsError:
    """The error as it was; one that this version does not know is an `OutcomeUnknown`."""
    kind = _CLASSES.get(sent.name)
    if kind is None:
        return OutcomeUnknown(f"the node failed with {quoted(sent.name)}: {sent.text}")
    error: PxrsError = kind.__new__(kind, sent.text)
    for name, value in sent.attributes.items():
        wanted = _ATTRIBUTES.get((sent.name, name), Any)
        vars(error)[name] = msgspec.convert(value, wanted)
    return error


def encode_error(error: PxrsError) -> msgspec.Raw:
    return _raw(pack_error(error))


def decode_error(sent: msgspec.Raw) -> PxrsError:
    return unpack_error(_ERROR.decode(sent))


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
    kinds = tuple(hints[it] for it in parameters)
    arguments: Any = msgspec.msgpack.Decoder(tuple[kinds] if kinds else tuple[()])  # type: ignore[valid-type]
    answer: Any = msgspec.msgpack.Decoder(hints["return"] if returns is None else returns)
    return Method(name, parameters, defaults, arguments, answer, repeatable, **packing)


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


def _unpack_appended(sent: Sequence[WireAppended]) -> list[Appended | PxrsError]:
    return [
        unpack_error(it.error) if it.error is not None else it.appended or Appended(0)
        for it in sent
    ]


# Of the node itself: sessions and watches that it holds for the client, and commits of several
# stores. They are written as the seams are, for the same reading of types.


class NodeCalls(Protocol):
    """Calls that are no method of a store."""

    def open_session(self, ttl: float) -> str: ...

    def renew_session(self, session: str) -> None: ...

    def close_session(self, session: str) -> None: ...

    def watch_records(self, watch: int, where: list[str]) -> None: ...

    def watch_log(self, watch: int, where: list[types.LogPartition]) -> None: ...

    def watch_queues(self, watch: int, where: list[str]) -> None: ...

    def unwatch(self, watch: int) -> None: ...

    def atomic(
        self,
        checks: list[Check],
        writes: list[WireWrite],
        appends: list[Append],
        change: QueueChange | None,
    ) -> WireAtomic: ...


class WireAtomic(NamedTuple):
    """What came of a commit of several stores."""

    versions: dict[str, int]
    appended: list[Appended]
    queued: list[int | None]


def _of(seam: type, folder: str, once: str, again: str, odd: Mapping[str, Any]) -> list[Method]:
    """The methods of a seam: those to be called once, and those that may be called again."""
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
_RELEASE = {
    # Errors come from handlers, and may be any text.
    "pack": lambda values: (
        values[0],
        [it._replace(error=storable(it.error)) for it in values[1]],
    ),
}
METHODS: dict[str, Method] = {
    method.name: method
    for method in [
        *_of(CoordStore, "coord", "commit", "get list", {"commit": _COMMIT}),
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
            "take apply redrive purge drop",
            "create find all delete held extend outcome release reap stats peek",
            {"release": _RELEASE},
        ),
        *_of(ItemRestorer, "queues", "", "restore", {}),
        *_of(
            NodeCalls,
            "node",
            "atomic",
            "open_session renew_session close_session watch_records watch_log watch_queues unwatch",
            {},
        ),
    ]
}

_HELLO = msgspec.msgpack.Decoder(Hello)


def encode_hello(hello: Hello) -> msgspec.Raw:
    return _raw(hello)


def decode_hello(sent: msgspec.Raw) -> Hello:
    """What a node tells; raises `StoreUnavailable` if it speaks otherwise."""
    try:
        return _HELLO.decode(sent)
    except msgspec.DecodeError as error:
        raise StoreUnavailable(f"the node speaks another version: {error}") from None
