"""Checks arguments of public calls before anything is done with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pxrs.errors import InvalidRequest, quoted
from pxrs.options import TransactionOptions, refuse_unknown
from pxrs.types import Message, TopicPartition


def check_whole(name: str, value: object, least: int | None = None) -> None:
    """Rejects values that are not integers (a bool is none), or are below `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be an integer, got {quoted(value)}")
    if least is not None and value < least:
        raise InvalidRequest(f"{name} must be at least {least}, got {value}")


def check_timeout(value: object) -> None:
    """Rejects values that are not seconds. Below 0 does not wait; NaN would wait for ever."""
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise InvalidRequest(
            f"timeout must be seconds, or None to wait for ever; got {quoted(value)}"
        )


def check_time(name: str, value: object) -> None:
    """Rejects values that are not milliseconds since 1970, as messages have them."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(
            f"{name} must be milliseconds since 1970, got {quoted(value)}; "
            "for a datetime pass int(moment.timestamp() * 1000)"
        )


def check_message(value: object) -> None:
    """Rejects values that are not messages of a consumer."""
    if not isinstance(value, Message):
        raise InvalidRequest(
            f"message must be one that this consumer returned, got {quoted(value)}"
        )


def check_parts(parts: Iterable[object]) -> list[TopicPartition]:
    """Returns the partitions; rejects values that are none."""
    checked = []
    for part in parts:
        match part:
            case (str(topic), int(partition)):
                checked.append(TopicPartition(topic, partition))
            case _:
                raise InvalidRequest(
                    f"partitions must be given as TopicPartition('orders', 0), got {quoted(part)}"
                )
    return checked


def check_numbers(partitions: object) -> list[int]:
    """Returns the numbers of partitions, sorted."""
    if not isinstance(partitions, Iterable) or isinstance(partitions, str):
        raise InvalidRequest(f"partitions must be a list of numbers, got {quoted(partitions)}")
    numbers = set(partitions)
    for number in numbers:
        check_whole("partition", number)
    return sorted(numbers)


def check_handler(handler: object, *takes: str, instead: str | None = None) -> None:
    """Rejects handlers that can't be called with these arguments: every message would fail.

    Also rejects handlers that do nothing when they are called: generator functions, and coroutine
    functions unless the caller awaits them. They would seem to succeed, and their messages would
    be gone. `instead` names the function that awaits coroutines.
    """
    if not callable(handler):
        raise InvalidRequest(
            f"handler must be a function that takes ({', '.join(takes)}), "
            f"got {type(handler).__name__}"
        )
    from inspect import signature

    if instead is not None and is_coroutine_function(handler):
        raise InvalidRequest(f"the handler is a coroutine function; use {instead} for those")
    if is_generator_function(handler):
        raise InvalidRequest(
            "the handler is a generator function, and calling it runs none of its code; "
            "remove yield, and return when the work is done"
        )
    try:
        parameters = signature(handler)
    except (TypeError, ValueError):
        # Some functions written in C have no signature.
        return
    try:
        parameters.bind(*takes)
    except TypeError as error:
        raise InvalidRequest(
            f"the handler can't be called as handler({', '.join(takes)}): {error}"
        ) from None


def is_coroutine_function(handler: object) -> bool:
    """Whether calling it makes a coroutine; also for objects with `__call__`."""
    from inspect import iscoroutinefunction

    return any(map(iscoroutinefunction, _called(handler)))


def is_generator_function(handler: object) -> bool:
    """Whether calling it makes a generator, also an asynchronous one or by `__call__`."""
    from inspect import isasyncgenfunction, isgeneratorfunction

    return any(isgeneratorfunction(each) or isasyncgenfunction(each) for each in _called(handler))


def _called(handler: object) -> list[Any]:
    """Returns the functions that may run when the handler is called."""
    from functools import partial

    while isinstance(handler, partial):
        handler = handler.func
    return [handler, getattr(type(handler), "__call__", None)]  # noqa: B004


# Connections of callers: the call must say who commits them


def given_connection(verb: str, unsaid: object, options: TransactionOptions) -> Any:
    """Returns the connection for `Stores.atomic`: none, one that pxrs commits, or one to join."""
    refuse_unknown(verb, options, TransactionOptions)
    refuse_unsaid(
        unsaid,
        f"px.{verb}(join=connection) if you commit, px.{verb}(commits=connection) if pxrs shall",
    )
    commits, join = options.get("commits"), options.get("join")
    if commits is not None and join is not None:
        raise InvalidRequest(
            "pass commits= or join=, not both: a connection is either committed by pxrs or joined"
        )
    if commits is None:
        return join
    from pxrs.stores.connections import Lent

    return Lent(commits)


def refuse_unsaid(connection: object, instead: str) -> None:
    """Rejects a connection without `join=` or `commits=`: its state must not decide who commits."""
    if connection is not None:
        raise InvalidRequest(
            f"a {type(connection).__name__} alone does not say who commits it; write {instead}"
        )


def check_connection(connection: object) -> None:
    """Rejects a missing connection."""
    if connection is None:
        raise InvalidRequest(
            "connection must be the one whose transaction the message belongs to, got None; "
            "without one, send with px.producer()"
        )
