"""What callers hand over, checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pxrs.errors import InvalidRequest
from pxrs.types import Message, TopicPartition


def check_whole(name: str, value: object, least: int | None = None) -> None:
    """Refuse what is not a whole number, such as a bool, or less than the least."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} = {value!r}; a whole number is needed")
    if least is not None and value < least:
        raise InvalidRequest(f"{name} = {value}; at least {least} is needed")


def check_timeout(value: object) -> None:
    """Refuse what is not a number of seconds. One below 0 does not wait; NaN would for ever."""
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise InvalidRequest(f"timeout = {value!r}; seconds are needed, or None to wait for ever")


def check_time(name: str, value: object) -> None:
    """Refuse what is not a time as messages carry it."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(
            f"{name} = {value!r}; milliseconds since 1970 are needed: "
            "of a datetime int(moment.timestamp() * 1000)"
        )


def check_message(value: object) -> None:
    """Refuse what was not handed out by a consumer."""
    if not isinstance(value, Message):
        raise InvalidRequest(f"{value!r} is not a message; pass one that was handed out, or none")


def check_parts(parts: Iterable[object]) -> list[TopicPartition]:
    """The partitions, if that is what they are."""
    checked = []
    for part in parts:
        match part:
            case (str(topic), int(partition)):
                checked.append(TopicPartition(topic, partition))
            case _:
                raise InvalidRequest(
                    f"{part!r} is not a partition; pass TopicPartition('orders', 0), "
                    "or several of them"
                )
    return checked


def check_numbers(partitions: object) -> list[int]:
    """The partitions' numbers, in order."""
    if not isinstance(partitions, Iterable) or isinstance(partitions, str):
        raise InvalidRequest(f"partitions = {partitions!r}; a list of numbers is needed")
    numbers = set(partitions)
    for number in numbers:
        check_whole("a partition", number)
    return sorted(numbers)


def check_handler(handler: object, *takes: str, instead: str | None = None) -> None:
    """Refuse what can't be called with these: everything would fail, and end as a dead letter.

    So is what does nothing when it is called: generators, and coroutines unless they are awaited
    here. They would seem to succeed, and their messages would be gone. `instead`: who awaits them.
    """
    if not callable(handler):
        raise InvalidRequest(
            f"the handler is of type {type(handler).__name__}; "
            f"a function that takes ({', '.join(takes)}) is needed"
        )
    from inspect import signature

    if instead is not None and is_coroutine_function(handler):
        raise InvalidRequest(f"the handler is a coroutine function; for those is {instead}")
    if is_generator_function(handler):
        raise InvalidRequest(
            "the handler is a generator function: calling it runs none of it. "
            "Let it return when it has done its work, without yield"
        )
    try:
        parameters = signature(handler)
    except (TypeError, ValueError):
        # Some that are written in C do not tell.
        return
    try:
        parameters.bind(*takes)
    except TypeError as error:
        raise InvalidRequest(
            f"the handler can't be called as handler({', '.join(takes)}): {error}"
        ) from None


def is_coroutine_function(handler: object) -> bool:
    """Also of an object that is called."""
    from inspect import iscoroutinefunction

    return any(map(iscoroutinefunction, _called(handler)))


def is_generator_function(handler: object) -> bool:
    """Also of an object that is called, and of asynchronous ones."""
    from inspect import isasyncgenfunction, isgeneratorfunction

    return any(isgeneratorfunction(each) or isasyncgenfunction(each) for each in _called(handler))


def _called(handler: object) -> list[Any]:
    """What runs when the handler is called: itself, or how objects of its type are called."""
    from functools import partial

    while isinstance(handler, partial):
        handler = handler.func
    return [handler, getattr(type(handler), "__call__", None)]  # noqa: B004
