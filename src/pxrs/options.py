"""The options of `producer`, `consumer`, `run`, `listen` and `put`, declared once for all of them.

Functions take them as `**options: Unpack[ConsumerOptions]`, so type checkers know every name and
type. Defaults and checks are those of the settings that are filled with them. A `serde` is a
parameter of its own, no option: type checkers know by it what values are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
)

import msgspec

from pxrs.config import OnFailure, OnTrimmed, Parallel, Start, Strategy
from pxrs.core.retry import Backoff
from pxrs.serde import Serde
from pxrs.types import Header, TopicPartition

T = TypeVar("T")
P = ParamSpec("P")
Told = TypeVar("Told")
F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=msgspec.Struct)


class ProducerOptions(TypedDict, total=False):
    """Options of `px.producer`. Seconds and bytes.

    linger: seconds that a message may wait for others to share its batch.
    batch_bytes: when a batch is full; one batch is of one thread and partition.
    buffer_bytes: the limit for all messages that are not durable yet. When it is reached, `send` …
    max_block: … waits for this many seconds, then raises `BufferFull`.
    max_message_bytes: key, value and headers; a larger message raises `MessageTooLarge`.
    delivery_timeout: seconds that the producer tries, from when a message's batch began.
    compression: of batches: "none", "gzip", "snappy", "lz4" or "zstd".
    key_serde: how objects become keys, as `serde` does it with values; without, both are text or
        bytes.
    """

    linger: float
    batch_bytes: int
    buffer_bytes: int
    max_message_bytes: int
    max_block: float
    delivery_timeout: float
    compression: str
    key_serde: Serde | None


class MemberOptions(TypedDict, total=False):
    """Options of a member of a group: for `px.consumer` and `px.run`.

    instance: a name that makes the member static: it keeps its partitions across a quick restart.
    auto_commit_interval: seconds between two commits of what was handled.
    start: where to begin without a checkpoint: "earliest", "latest", or "error" to raise; or the
        last offset that was handled elsewhere, of each topic: {"events": 48213}.
    on_trimmed: what to do when retention has removed the checkpoint's message: "error" to raise,
        or jump to "earliest" or "latest", which is recorded.
    prefetch_bytes: how much is fetched ahead, decompressed, of all partitions together.
    stuck_after: seconds that a handler may have the same messages before that is reported.
    session_ttl: seconds that a member that is frozen or cut off keeps its partitions.
    debounce: seconds that a change of the group waits for more: many joins, one rebalance.
    revoke_timeout: seconds that a handler may keep a partition that another member is to own;
        then it is taken by force. None: as long as its session lives.
    rejoin_timeout: seconds that a static member's partitions wait for it.
    strategy: "sticky" moves the fewest partitions; "fair" and "range" divide anew, in order.
    key_serde: how keys become objects, as `serde` does it with values; without, both are bytes.
    """

    instance: str | None
    auto_commit_interval: float
    start: Start
    on_trimmed: OnTrimmed
    prefetch_bytes: int
    stuck_after: float
    session_ttl: float
    debounce: float
    revoke_timeout: float | None
    rejoin_timeout: float
    strategy: Strategy
    key_serde: Serde | None


class CallbackOptions(MemberOptions, Generic[Told], total=False):
    """`ConsumerOptions`, for callbacks that return `Told`."""

    auto_commit: bool
    on_assigned: Callable[[dict[TopicPartition, int | None]], Told] | None
    on_revoked: Callable[[set[TopicPartition]], Told] | None
    on_lost: Callable[[set[TopicPartition]], Told] | None


class ConsumerOptions(CallbackOptions[None], total=False):
    """Options of `px.consumer`, besides `MemberOptions`.

    auto_commit: whether handled messages are committed in the background.
    on_assigned: called with the partitions that came and their checkpoints.
    on_revoked: called with the partitions that are about to go; it can still commit.
    on_lost: called instead when another member owns them already.
    """


class RunOptions(MemberOptions, total=False):
    """Options of `px.run`, besides `MemberOptions`.

    workers: threads, in each process.
    processes: how many processes do it, each a member of its own; 0: none but this one.
    parallel: handle one message of a "partition" at a time, or one of a "key".
    retry: when a handler that raised is called again, and how often: `Backoff(attempts=5)`.
    on_failure: what happens to the message then: `DeadLetter()` writes it to a topic and goes on,
        `Stop()` ends the run with `HandlerFailed`.
    max_in_flight: how many messages may be fetched and not finished.
    max_handler_time: seconds that a handler may take. After that others get its message: a thread
        can't be killed, so the run leaves the group and ends with `HandlerFailed`.
    """

    workers: int
    processes: int
    parallel: Parallel
    retry: Backoff
    on_failure: OnFailure
    max_in_flight: int
    max_handler_time: float | None


class PutManyOptions(TypedDict, total=False):
    """Options of `put_many`, for each of its items.

    priority: a higher one goes first.
    delay: seconds before which the item is not handed out.
    key: items of one key are handed out strictly in order.
    headers: names and bytes that go with the item.
    """

    priority: int
    delay: float
    key: str | None
    headers: Sequence[Header] | None


class PutOptions(PutManyOptions, total=False):
    """Options of `put`, besides `PutManyOptions`.

    dedupe: of several items with one dedupe key within the window only the first is put.
    dedupe_window: seconds from then on.
    """

    dedupe: str | None
    dedupe_window: float


class TransactionOptions(TypedDict, total=False):
    """Options of `px.transaction` and `px.begin`.

    commits: a connection of the caller's that pxrs commits, with all that is done on it.
    join: one that the caller commits. pxrs neither begins nor commits nor rolls back: the block's
        changes are written when it is left, and land when, and only if, the caller commits.
    strict: taking from a queue that does not exist is an error.
    """

    commits: Any
    join: Any
    strict: bool


class DeadOptions(TypedDict, total=False):
    """Options that choose dead items of a queue. An item must match all that are given.

    ids: the items with these ids.
    key: the items with this key.
    error: the items whose error contains this text.
    dead_for: the items that have been dead for at least so many seconds.
    """

    ids: Sequence[int] | None
    key: str | None
    error: str | None
    dead_for: float | None


class ListenOptions(TypedDict, total=False):
    """Options of `px.listen`.

    workers: threads, in each process.
    processes: how many processes do it; 0: none but this one.
    retry: how often an item is delivered, and when again after its handler raised.
    on_failure: what happens to the item then: `DeadLetter()` keeps it among the queue's dead items,
        `Stop()` gives it back and ends the listener with `HandlerFailed`.
    max_handler_time: seconds that a handler may take. After that others get its item, and its
        commit is refused; the other workers go on.
    deadline: seconds that an item is held for, extended while it is being handled: a process that
        is frozen or cut off loses it then. None: as long as its session lives.
    """

    workers: int
    processes: int
    retry: Backoff
    on_failure: OnFailure
    max_handler_time: float | None
    deadline: float | None


def takes(
    *kinds: type, defaults: Sequence[type[msgspec.Struct]] = (), **more: object
) -> Callable[[F], F]:
    """Let `help` and `inspect.signature` show each option of a function that takes `**options`.

    The last kind has all options; the kinds before are those that it extends. The defaults are
    those of the settings, and `more`.
    """

    def describe(function: F) -> F:
        known = more | {name: it for each in defaults for name, it in _defaults_of(each).items()}
        own = inspect.signature(function)
        named = [
            each
            for each in own.parameters.values()
            if each.kind is not each.VAR_KEYWORD and each.name not in kinds[-1].__annotations__
        ]
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=known.get(name),
                annotation=annotation,
            )
            for name, annotation in _types_of(kinds[-1]).items()
        ]
        described: Any = function
        described.__signature__ = own.replace(parameters=[*named, *options])
        described.options_help = "\n\n".join(inspect.cleandoc(kind.__doc__ or "") for kind in kinds)
        add_options_help(function, described)
        return function

    return describe


def declared(
    declaration: Callable[Concatenate[Any, P], T],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[Any, P], T]]:
    """Decorates a method whose declaration is generic, as its types differ in `pxrs` and `aio`.

    It names the parameters; their types and defaults, and its result, are those of the declaration.
    """

    def sign(method: Any) -> Any:
        take_parameters(method, declaration)
        method.__signature__ = inspect.signature(declaration)
        return method

    return sign


def take_parameters(function: Any, other: Any) -> None:
    """Give a function the types and defaults of another's parameters, which it has to name."""
    own, theirs = inspect.signature(function), inspect.signature(other)
    if all(each.kind is not each.VAR_POSITIONAL for each in own.parameters.values()):
        if _names(own) != _names(theirs):
            raise TypeError(f"{function.__qualname__} must have the parameters {theirs}, got {own}")
        function.__defaults__, function.__kwdefaults__ = other.__defaults__, other.__kwdefaults__
    function.__signature__ = theirs.replace(return_annotation=own.return_annotation)


def _names(signature: inspect.Signature) -> list[tuple[str, Any]]:
    return [(each.name, each.kind) for each in signature.parameters.values()]


def _types_of(kind: Any) -> dict[str, str]:
    """The types of options as they are written, with the arguments of a generic kind."""
    types = {name: each.__forward_arg__ for name, each in kind.__annotations__.items()}
    for base in getattr(kind, "__orig_bases__", ()):
        variables = getattr(get_origin(base), "__parameters__", ())
        for variable, given in zip(variables, get_args(base), strict=True):
            shown = "None" if given is type(None) else str(given).replace("collections.abc.", "")
            types = {name: text.replace(variable.__name__, shown) for name, text in types.items()}
    return types


def add_options_help(function: Any, described: Any) -> None:
    """Add the options of another function, which `takes` them, to this one's help."""
    if listed := getattr(described, "options_help", ""):
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{listed}"


def _defaults_of(settings: type[msgspec.Struct]) -> dict[str, object]:
    # The last fields have the defaults.
    pairs = zip(
        reversed(settings.__struct_fields__), reversed(settings.__struct_defaults__), strict=False
    )
    return {name: value for name, value in pairs if value is not msgspec.NODEFAULT}


def refuse_unknown(call: str, options: Mapping[str, object], kind: type) -> None:
    """Raise the `TypeError` that Python raises for arguments that a function does not have."""
    known = kind.__annotations__
    for name in options:
        if name not in known:
            from difflib import get_close_matches

            meant = get_close_matches(name, known, n=1)
            advice = (
                f"Did you mean {meant[0]!r}?" if meant else f"It takes {', '.join(sorted(known))}"
            )
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}. {advice}")


def filled(settings: type[S], options: Mapping[str, object], **given: object) -> S:
    """The settings, filled with `given` and with the options that they have."""
    own = {name: value for name, value in options.items() if name in settings.__struct_fields__}
    return settings(**{**own, **given})
