"""The frames between a client and a node: calls, answers and errors.

A client and a node share one stream of frames. A frame holds what was waiting: calls, each with
a number, the name of a method and its arguments; or answers, each with the call's number. Both are
MessagePack. What each method takes and returns is a `Method`; a value that does not fit is refused
before it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from pxrs import errors
from pxrs.errors import (
    InvalidRequest,
    NotLeader,
    OutcomeUnknown,
    PxrsError,
    StoreUnavailable,
    quoted,
)
from pxrs.types import Limits, QueueLimits, TopicPartition, Version, Versioned

# Where nodes take the WebSocket that carries the frames, one in each message.
PATH = "/v1/stream"
# The first frame of a stream identifies the client; it is answered like a call with this number.
HELLO = 0
ANSWER, ERROR, WOKEN = 0, 1, 2
# The largest call, and the largest body of an item.
MOST_CALL_BYTES = 8 * 2**20
MOST_BODY_BYTES = 4 * 2**20
# A node has to keep the part of a frame that has come, for every client: so frames are small. A
# call that is larger than a piece goes in several frames, all but the last without a name.
PIECE = ""
MOST_PIECE_BYTES = 2**20
MOST_FRAME_BYTES = MOST_PIECE_BYTES + 2**18
MOST_CALLS_IN_FRAME = 1000
# An answer, alone in its frame if it is large: an item may have come into the store otherwise.
MOST_ANSWER_BYTES = 72 * 2**20
# Small entries take much more memory than they have bytes.
MOST_ENTRIES = 20_000


class Hello(msgspec.Struct, frozen=True):
    """A node's answer to the first frame of a client."""

    node: str
    limits: Limits
    queue_limits: QueueLimits | None
    # What the store can do beyond the seams: "now", "atomic", "restore"; "lends": sessions
    # outlive the node that opened them.
    abilities: frozenset[str]


class WireError(msgspec.Struct, frozen=True):
    """An error by the name of its class, with its text and attributes."""

    name: str
    text: str
    attributes: dict[str, Any] = {}


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Method(NamedTuple):
    """One method of a seam on the wire.

    `repeatable`: a call whose answer was lost may be made again. `pack` turns arguments into the
    values that are sent, `unpack` turns these back; `pack_answer` and `unpack_answer` likewise.
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
            raise InvalidRequest(f"the arguments of {self.name} can't be sent: {error}") from None
        if len(memoryview(sent)) > MOST_CALL_BYTES:
            raise InvalidRequest(
                f"a call of {self.name} must have at most {MOST_CALL_BYTES} bytes, "
                f"got {len(memoryview(sent))}"
            )
        return sent

    def decode(self, sent: msgspec.Raw) -> dict[str, Any]:
        """The arguments by name; raises `InvalidRequest` if they do not fit."""
        try:
            values = self.arguments.decode(sent)
            return dict(zip(self.parameters, self.unpack(values), strict=True))
        except _UNREADABLE as error:
            raise InvalidRequest(f"{self.name} got wrong arguments: {error}") from None

    def encode_answer(self, answer: Any) -> msgspec.Raw:
        return raw(self.pack_answer(answer))

    def decode_answer(self, sent: msgspec.Raw) -> Any:
        """The answer; raises `OutcomeUnknown` if it does not fit."""
        try:
            return self.unpack_answer(self.answer.decode(sent))
        except _UNREADABLE as error:
            raise OutcomeUnknown(
                f"the node's answer to {self.name} can't be read: {error}"
            ) from None


_ENCODER = msgspec.msgpack.Encoder()
_CALLS: msgspec.msgpack.Decoder[list[tuple[int, str, msgspec.Raw]]] = msgspec.msgpack.Decoder(
    Annotated[list[tuple[int, str, msgspec.Raw]], msgspec.Meta(max_length=MOST_CALLS_IN_FRAME)]
)
_PIECE = msgspec.msgpack.Decoder(bytes)
_ANSWERS: msgspec.msgpack.Decoder[list[tuple[int, int, msgspec.Raw]]] = msgspec.msgpack.Decoder(
    Annotated[list[tuple[int, int, msgspec.Raw]], msgspec.Meta(max_length=MOST_ENTRIES)]
)
_ERROR = msgspec.msgpack.Decoder(WireError)
NOTHING = msgspec.Raw(_ENCODER.encode(None))


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_ENCODER.encode(value))


def _clamped(value: Any) -> Any:
    """The value with numbers cut to 64 bits: no id and no count is beyond that."""
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


def encode_calls(calls: Sequence[tuple[int, str, msgspec.Raw]]) -> Iterator[bytes]:
    """Calls as frames, in order."""
    frame: list[tuple[int, str, msgspec.Raw]] = []
    size = 0
    for number, name, arguments in calls:
        data = memoryview(arguments)
        if frame and (size + len(data) > MOST_PIECE_BYTES or len(frame) == MOST_CALLS_IN_FRAME):
            yield encode_frame(frame)
            frame, size = [], 0
        if len(data) <= MOST_PIECE_BYTES:
            frame.append((number, name, arguments))
            size += len(data)
            continue
        pieces = [
            bytes(data[at : at + MOST_PIECE_BYTES]) for at in range(0, len(data), MOST_PIECE_BYTES)
        ]
        for piece in pieces[:-1]:
            yield encode_frame([(number, PIECE, raw(piece))])
        yield encode_frame([(number, name, raw(pieces[-1]))])
    if frame:
        yield encode_frame(frame)


def decode_piece(sent: msgspec.Raw) -> bytes:
    """A piece of a call's arguments; raises `InvalidRequest` if it is none."""
    try:
        return _PIECE.decode(sent)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"a piece of a call can't be read: {error}") from None


def decode_calls(frame: bytes) -> list[tuple[int, str, msgspec.Raw]]:
    """The calls of a frame; raises `InvalidRequest` if it is none."""
    try:
        return _CALLS.decode(frame)
    except _UNREADABLE as error:
        raise InvalidRequest(f"a frame can't be read: {error}") from None


def decode_answers(frame: bytes) -> list[tuple[int, int, msgspec.Raw]]:
    """The answers of a frame; raises `StoreUnavailable` if they can't be read."""
    try:
        return _ANSWERS.decode(frame)
    except _UNREADABLE as error:
        raise StoreUnavailable(f"the node's answer can't be read: {error}") from None


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
    ("NotLeader", "key"): bytes,
    ("NotLeader", "node"): str,
    ("NotLeader", "address"): str,
}


def pack_error(error: PxrsError) -> WireError:
    """The error as it goes over the wire."""
    attributes = msgspec.to_builtins(error.context, builtin_types=(bytes,), str_keys=True)
    return WireError(type(error).__name__, str(error), attributes)


def unpack_error(sent: WireError) -> PxrsError:
    """The error that was packed; one that this version does not know is an `OutcomeUnknown`."""
    kind = _CLASSES.get(sent.name)
    if kind is None:
        return OutcomeUnknown(f"the node failed with {quoted(sent.name)}: {sent.text}")
    error: PxrsError = kind.__new__(kind, sent.text)
    for name, value in sent.attributes.items():
        wanted = _ATTRIBUTES.get((sent.name, name), Any)
        try:
            vars(error)[name] = msgspec.convert(value, wanted)
        except _UNREADABLE:
            return OutcomeUnknown(
                f"the node failed with a {sent.name} that can't be read: {sent.text}"
            )
    if isinstance(error, NotLeader) and not {"key", "node", "address"} <= sent.attributes.keys():
        # The client itself goes to that node.
        return OutcomeUnknown(f"the node failed with a {sent.name} that names no node: {sent.text}")
    return error


def encode_error(error: PxrsError) -> msgspec.Raw:
    return raw(pack_error(error))


def decode_error(sent: msgspec.Raw) -> PxrsError:
    """The error that was sent; `OutcomeUnknown` if it can't be read."""
    try:
        return unpack_error(_ERROR.decode(sent))
    except _UNREADABLE as error:
        return OutcomeUnknown(f"the node failed with an error that can't be read: {error}")


_HELLO = msgspec.msgpack.Decoder(Hello)


def encode_hello(hello: Hello) -> msgspec.Raw:
    return raw(hello)


def decode_hello(sent: msgspec.Raw) -> Hello:
    """The node's answer to the first frame; raises `StoreUnavailable` if it can't be read."""
    try:
        return _HELLO.decode(sent)
    except _UNREADABLE as error:
        raise StoreUnavailable(f"the node speaks another version of pxrs://: {error}") from None
