"""Options are declared once: signatures, help and settings have the same ones."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

import pytest
from msgspec.structs import fields as fields_of

import pxrs
from pxrs import aio
from pxrs.config import ConsumerSettings, ProducerSettings
from pxrs.running.job import ListenJob, RunJob
from support.loops import run

KINDS = [
    (pxrs.Pxrs.producer, pxrs.ProducerOptions, [ProducerSettings]),
    (pxrs.Pxrs.consumer, pxrs.ConsumerOptions, [ConsumerSettings]),
    (pxrs.Pxrs.run, pxrs.RunOptions, [ConsumerSettings, RunJob]),
    (pxrs.Pxrs.listen, pxrs.ListenOptions, [ListenJob]),
    (aio.Pxrs.producer, pxrs.ProducerOptions, [ProducerSettings]),
    (aio.Pxrs.consumer, aio.ConsumerOptions, [ConsumerSettings]),
    (aio.Pxrs.run, pxrs.RunOptions, [ConsumerSettings, RunJob]),
    (aio.Pxrs.listen, pxrs.ListenOptions, [ListenJob]),
]
# Not what a struct of settings has: they go elsewhere, and None is none of them.
WITHOUT_DEFAULT = {"instance", "serde", "key_serde", "on_assigned", "on_revoked", "on_lost"}


def handle(*args: object) -> None:
    """Fine."""


@pytest.mark.parametrize(("function", "kind", "settings"), KINDS)
def test_help_tells_each_option(
    function: Callable[..., Any], kind: type, settings: list[Any]
) -> None:
    shown = pydoc.plain(pydoc.render_doc(function))
    parameters = inspect.signature(function).parameters
    for name in get_type_hints(kind):
        assert re.search(rf"^ *([\w, ]+, )?{name}(, \w+)?: ", shown, re.MULTILINE), name
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert "options" not in parameters
    assert parameters.keys() - get_type_hints(kind).keys() <= {
        "self", "topics", "group", "handler", "topic", "queue", "serde",
    }  # fmt: skip


@pytest.mark.parametrize(("function", "kind", "settings"), KINDS)
def test_options_are_what_settings_have(
    function: Callable[..., Any], kind: type, settings: list[Any]
) -> None:
    fields = {name: hint for each in settings for name, hint in get_type_hints(each).items()}
    defaults = {field.name: field.default for each in settings for field in fields_of(each)}
    parameters = inspect.signature(function).parameters
    for name, hint in get_type_hints(kind).items():
        if name in WITHOUT_DEFAULT:
            assert parameters[name].default is None
        else:
            assert hint in (fields[name], fields[name] | None), name
            assert parameters[name].default == defaults[name], name


@pytest.mark.parametrize(
    ("meant", "call"),
    [
        ("linger", lambda px: px.producer(lingr=1)),
        ("session_ttl", lambda px: px.consumer("orders", "g", sesion_ttl=1)),
        ("workers", lambda px: px.run(handle, topic="orders", group="g", worker=1)),
        ("deadline", lambda px: px.listen("mail", handle, dead_line=1)),
    ],
)
def test_unknown_options_are_refused_and_the_known_one_is_named(
    meant: str, call: Callable[[Any], object]
) -> None:
    refused = rf"\(\) got an unexpected keyword argument '\w+'\. Did you mean '{meant}'\?"
    with pxrs.connect("memory://") as px, pytest.raises(TypeError, match=refused):
        call(px)

    async def in_asyncio() -> None:
        async with aio.connect("memory://") as px:
            with pytest.raises(TypeError, match=refused):
                found = call(px)
                assert isinstance(found, Awaitable)
                await found

    run(in_asyncio())


def test_what_is_like_no_option_is_told_which_there_are() -> None:
    anything: Any = {"colour": "red"}
    with pxrs.connect("memory://") as px:
        with pytest.raises(TypeError, match=r"'colour'\. It takes batch_bytes, .*serde"):
            px.producer(**anything)
        with pytest.raises(TypeError, match="'auto_commit'"):  # `run` always does
            px.run(handle, topic="orders", group="g", auto_commit=True)  # type: ignore[call-overload]


def test_options_can_be_kept_as_a_value() -> None:
    options: pxrs.ConsumerOptions = {"start": "latest", "session_ttl": 5.0}
    with pxrs.connect("memory://") as px:
        px.topics.create("orders", partitions=1)
        with px.consumer("orders", "g", **options) as consumer:
            assert consumer.member


def type_checkers_know_names_and_types(px: pxrs.Pxrs, apx: aio.Pxrs) -> None:
    """Never called: an error that mypy does not find here is an unused `ignore`, which it tells."""
    px.producer(lingr=1.0)  # type: ignore[call-arg]
    px.producer(linger="soon")  # type: ignore[arg-type]
    px.consumer("orders", "g", sesion_ttl=1.0)  # type: ignore[call-arg]
    px.consumer("orders", "g", start="newest")  # type: ignore[arg-type]
    px.run(handle, topic="orders", group="g", workers="2")  # type: ignore[call-overload]
    px.listen("mail", handle, deadline="never")  # type: ignore[call-overload]
    apx.producer(linger="soon")  # type: ignore[arg-type]
    apx.consumer("orders", "g", sesion_ttl=1.0)  # type: ignore[call-arg]
    apx.listen("mail", handle, worker=1)  # type: ignore[call-overload]

    async def told(parts: object) -> None:
        """Only asyncio's consumer awaits it."""

    apx.consumer("orders", "g", on_lost=told)
    px.consumer("orders", "g", on_lost=told)  # type: ignore[arg-type]
