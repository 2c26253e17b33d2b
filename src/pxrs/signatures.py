"""Calls that have other types in `aio` than in `pxrs`, or need overloads, declared once for both.

Without a serde values are text or bytes; with one they are its type. `put`, `put_many`, `run` and
`listen` need overloads to say that, because the value or the handler would decide otherwise. A
method gets them from its decorator, `@signatures.put`, and only its result is its own: an id, or
in `aio` the coroutine of one. For `help` the decorator adds the options and their defaults. The
callbacks of `consumer` may be coroutine functions in `aio`: its declaration is generic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Protocol,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from pxrs.config import ConsumerSettings
from pxrs.options import (
    CallbackOptions,
    ListenOptions,
    MemberOptions,
    PutManyOptions,
    PutOptions,
    RunOptions,
    takes,
)
from pxrs.running.job import ListenJob, RunJob
from pxrs.serde import Serde
from pxrs.types import Message, NewItem, Read, Value

if TYPE_CHECKING:
    from pxrs.consuming.consumer import Consumer
    from pxrs.queues.item import Item

Result = TypeVar("Result", covariant=True)
Tx = TypeVar("Tx", covariant=True)
Told = TypeVar("Told", contravariant=True)

Topics = str | Sequence[str] | re.Pattern[str]


class Put(Protocol[Result]):
    """`px.put`."""

    @overload
    def __call__(
        self,
        queue: str,
        value: str | bytes,
        *,
        serde: None = None,
        connection: Any = None,
        **options: Unpack[PutOptions],
    ) -> Result: ...

    @overload
    def __call__(
        self,
        queue: str,
        value: Value,
        *,
        serde: Serde[Value],
        connection: Any = None,
        **options: Unpack[PutOptions],
    ) -> Result: ...


class PutMany(Protocol[Result]):
    """`px.put_many`."""

    @overload
    def __call__(
        self,
        queue: str,
        values: Iterable[str | bytes],
        *,
        serde: None = None,
        connection: Any = None,
        **options: Unpack[PutManyOptions],
    ) -> Result: ...

    @overload
    def __call__(
        self,
        queue: str,
        values: Iterable[Value],
        *,
        serde: Serde[Value],
        connection: Any = None,
        **options: Unpack[PutManyOptions],
    ) -> Result: ...


class Consuming(Protocol[Told]):
    """`px.consumer`. `Told` is what callbacks return: None, or in `aio` perhaps an awaitable."""

    def consumer(
        self,
        topics: str | Sequence[str] | re.Pattern[str],
        group: str,
        *,
        serde: Serde[Read] | None = None,
        **options: Unpack[CallbackOptions[Told]],
    ) -> Consumer[Read]: ...


class Run(Protocol[Result]):
    """`px.run`."""

    @overload
    def __call__(
        self,
        handler: Callable[[Message[bytes]], Any],
        *,
        topic: Topics,
        group: str,
        serde: None = None,
        **options: Unpack[RunOptions],
    ) -> Result: ...

    @overload
    def __call__(
        self,
        handler: Callable[[Message[Value]], Any],
        *,
        topic: Topics,
        group: str,
        serde: Serde[Value],
        **options: Unpack[RunOptions],
    ) -> Result: ...


class Listen(Protocol[Tx, Result]):
    """`px.listen`. `Tx` is the transaction that its handlers get."""

    @overload
    def __call__(
        self,
        queue: str,
        handler: Callable[[Item[str | bytes], Tx], Any],
        *,
        serde: None = None,
        **options: Unpack[ListenOptions],
    ) -> Result: ...

    @overload
    def __call__(
        self,
        queue: str,
        handler: Callable[[Item[Value], Tx], Any],
        *,
        serde: Serde[Value],
        **options: Unpack[ListenOptions],
    ) -> Result: ...


def put(method: Callable[..., Result]) -> Put[Result]:
    """Declares the method as `Put`."""
    return takes(PutManyOptions, PutOptions, defaults=[NewItem])(method)


def put_many(method: Callable[..., Result]) -> PutMany[Result]:
    """Declares the method as `PutMany`."""
    return takes(PutManyOptions, defaults=[NewItem])(method)


def run(method: Callable[..., Result]) -> Run[Result]:
    """Declares the method as `Run`."""
    return takes(MemberOptions, RunOptions, defaults=[ConsumerSettings, RunJob])(method)


def listen(
    method: Callable[[Any, str, Callable[[Item, Tx], Any]], Result],
) -> Listen[Tx, Result]:
    """Declares the method as `Listen`, with the transaction that its own `handler` has."""
    return cast("Listen[Tx, Result]", takes(ListenOptions, defaults=[ListenJob])(method))
