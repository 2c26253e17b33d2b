"""What travels between a client and a node: frames of calls and answers, and errors.

A client and a node share one stream of frames. A frame holds what was waiting: calls, each with
a number, the name of a method and its arguments; or answers, each with the call's number. Both are
MessagePack. What each method takes and returns is a `Method`; whatever does not fit is refused
before anything is done with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pxrs import errors
from pxrs.errors import InvalidRequest, OutcomeUnknown, PxrsError, StoreUnavailable, quoted
from pxrs.types import Limits, QueueLimits, TopicPartition, Version, Versioned

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


class WireError(msgspec.Struct, frozen=True):
    """An error by the name of its class, with its text and attributes."""

    name: str
    text: str
    attributes: dict[str, Any] = {}


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
                sent = raw(packed)
            except OverflowError:
                sent = raw(_clamped(packed))
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
        return raw(self.pack_answer(answer))

    def decode_answer(self, sent: msgspec.Raw) -> Any:
        return self.unpack_answer(self.answer.decode(sent))


_ENCODER = msgspec.msgpack.Encoder()
_CALLS = msgspec.msgpack.Decoder(list[tuple[int, str, msgspec.Raw]])
_ANSWERS = msgspec.msgpack.Decoder(list[tuple[int, int, msgspec.Raw]])
_ERROR = msgspec.msgpack.Decoder(WireError)
NOTHING = msgspec.Raw(_ENCODER.encode(None))


def raw(value: Any) -> msgspec.Raw:
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
    attributes = msgspec.to_builtins(error.context, builtin_types=(bytes,), str_keys=True)
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
    return raw(pack_error(error))


def decode_error(sent: msgspec.Raw) -> PxrsError:
    return unpack_error(_ERROR.decode(sent))


_HELLO = msgspec.msgpack.Decoder(Hello)


def encode_hello(hello: Hello) -> msgspec.Raw:
    return raw(hello)


def decode_hello(sent: msgspec.Raw) -> Hello:
    """What a node tells; raises `StoreUnavailable` if it speaks otherwise."""
    try:
        return _HELLO.decode(sent)
    except msgspec.DecodeError as error:
        raise StoreUnavailable(f"the node speaks another version: {error}") from None
