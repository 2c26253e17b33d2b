"""The asynchronous classes have the methods of the blocking ones, with the same parameters."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, assert_type

import pytest

import pxrs
from pxrs import aio
from pxrs.aio.threads import signed_as
from support.loops import run

# What awaiting and cancelling stand for.
ONLY_BLOCKING = {"Consumer": {"wake"}, "Sent": {"when_done"}, "KeyWatch": {"wait"}}
ONLY_ASYNC = {"Follow", "Opening", "Arriving", "ConsumerOptions"}
# These return the classes or iterators of their own side, or take coroutines.
OF_ITS_OWN = {
    "producer", "reader", "follow", "consumer", "batches", "transaction", "run_transaction",
    "begin", "run", "listen", "commit", "commit_async", "scan",
}  # fmt: skip
# Attributes of the blocking class, properties of the other.
ATTRIBUTES = {"Reader": {"topic"}}
PAIRS = [
    (pxrs.Pxrs, aio.Pxrs),
    (pxrs.Producer, aio.Producer),
    (pxrs.Reader, aio.Reader),
    (pxrs.Sent, aio.Sent),
    (pxrs.SentMany, aio.SentMany),
    (pxrs.Consumer, aio.Consumer),
    (pxrs.Topics, aio.Topics),
    (pxrs.Groups, aio.Groups),
    (pxrs.Transaction, aio.Transaction),
    (pxrs.UnitOfWork, aio.UnitOfWork),
    (pxrs.Running, aio.Running),
    (pxrs.Queues, aio.Queues),
    (pxrs.KeyValues, aio.KeyValues),
    (pxrs.KeyWatch, aio.KeyWatch),
    (pxrs.TransactionKeys, aio.TransactionKeys),
    (pxrs.Sources, aio.Sources),
    (pxrs.Client, aio.Client),
]


def verbs(kind: type) -> dict[str, list[tuple[str, object, object]]]:
    """Public methods and their parameters: name, kind and default; properties have none."""
    found: dict[str, list[tuple[str, object, object]]] = {}
    for name, member in members(kind).items():
        if isinstance(member, property):
            found[name] = []
        elif inspect.isfunction(member):
            parameters = inspect.signature(member).parameters.values()
            found[name] = [(each.name, each.kind, each.default) for each in parameters]
    return found


def members(kind: type) -> dict[str, object]:
    """What the class and those of ours that it is made of define for users."""
    found: dict[str, object] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("pxrs."):
            found |= {name: it for name, it in vars(base).items() if not name.startswith("_")}
    return found


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS, ids=lambda kind: kind.__name__)
def test_same_verbs(blocking: type, awaited: type) -> None:
    expected = verbs(blocking)
    for name in ONLY_BLOCKING.get(blocking.__name__, ()):
        del expected[name]
    found = verbs(awaited)
    for name in ATTRIBUTES.get(awaited.__name__, ()):
        assert found.pop(name) == []
    assert found == expected


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS, ids=lambda kind: kind.__name__)
def test_same_types(blocking: type, awaited: type) -> None:
    for name in verbs(awaited).keys() & verbs(blocking).keys():
        mine, theirs = getattr(awaited, name), getattr(blocking, name)
        if inspect.isfunction(mine) and name not in OF_ITS_OWN:
            assert types(mine) == types(theirs), name


def types(method: Callable[..., object]) -> dict[str, object]:
    """The types of its parameters and of what it returns."""
    signature = inspect.signature(method)
    found = {each.name: each.annotation for each in signature.parameters.values()}
    return found | {"return": signature.return_annotation}


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS, ids=lambda kind: kind.__name__)
def test_all_of_them_have_help(blocking: type, awaited: type) -> None:
    for name in verbs(awaited):
        assert inspect.getdoc(getattr(awaited, name)), name


# What gives a function the parameters of the blocking one, or of the declaration for both sides.
TAKES_PARAMETERS = {"signed_as", "signed_as_function", "wrapping", "shown_as"}


def test_no_parameters_are_written_out_again() -> None:
    assert {name for name, written in written_out() if spells(written)} == set()


def test_to_write_them_out_again_would_be_found() -> None:
    for again in (
        "async def seek(self, topic: str, partition: int, offset: int) -> None: ...",
        "async def poll(self, max_records=500, timeout=None): ...",
        "@takes(TransactionOptions)\ndef begin(self, connection: None = None, **options: Any): ...",
        "@signed_as(blocking.Reader.follow)\ndef follow(self, start: Any = 0): ...",
        "@signed_as(blocking.Reader.follow)\ndef follow(self, partitions: list[int]): ...",
        "@signatures.put\n@shown_as(put)\ndef put(self, *args: Any, serde: Any = None): ...",
    ):
        assert spells(ast.parse(again).body[0]), again
    for taken in (
        "async def close(self) -> None: ...",
        "@signed_as(blocking.Consumer.poll)\nasync def poll(self, max_records: Any): ...",
        "@wrapping(blocking.Pxrs.reader)\ndef reader(self, find: partial[Reader[Read]]): ...",
    ):
        assert not spells(ast.parse(taken).body[0]), taken


def test_a_function_that_names_others_than_it_takes_is_refused() -> None:
    def poll(self: object, most: Any, timeout: Any) -> None:
        """Has another name for what the blocking one calls max_records."""

    with pytest.raises(TypeError, match=r"poll must have the parameters \(self, max_records"):
        signed_as(pxrs.Consumer.poll)(poll)


def written_out() -> Iterator[tuple[str, ast.stmt]]:
    """The functions in the source of public classes of `aio`, and of its public functions."""
    public = {name: getattr(aio, name) for name in aio.__all__}
    for module in {value.__module__ for value in public.values()}:
        for each in ast.parse(inspect.getsource(sys.modules[module])).body:
            if isinstance(each, ast.FunctionDef) and each.name in public:
                yield each.name, each
            if isinstance(each, ast.ClassDef) and each.name in public:
                for member in each.body:
                    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not (
                        member.name.startswith("_")
                    ):
                        yield f"{each.name}.{member.name}", member


def spells(function: ast.stmt) -> bool:
    """Whether it has a parameter of its own, or a type or default for one that it has taken."""
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    own = [each for each in named if each.arg != "self"]
    if not own and not args.vararg and not args.kwarg:
        return False
    decorators = {ast.unparse(each).partition("(")[0] for each in function.decorator_list}
    if not decorators & TAKES_PARAMETERS:
        return True
    types = [ast.unparse(each.annotation) for each in own if each.annotation is not None]
    if any(default is not None for default in [*args.defaults, *args.kw_defaults]):
        return True
    # Those of `signatures` get their types from there.
    return "shown_as" not in decorators and any(
        each != "Any" and not each.startswith("partial[") for each in types
    )


def test_what_is_forwarded_is_a_coroutine_function_unless_it_does_not_wait() -> None:
    for method in (aio.Topics.list, aio.Groups.describe, aio.Queues.rates, aio.UnitOfWork.send):
        assert inspect.iscoroutinefunction(method)
    for plain in (aio.Pxrs.stop, aio.Pxrs.health, aio.Consumer.pause, aio.Running.stop):
        assert not inspect.iscoroutinefunction(plain)


def test_wrong_arguments_are_refused_by_the_blocking_method() -> None:
    anything: Any = {"groop": "g"}

    async def main() -> None:
        async with aio.connect("memory://") as px:
            with pytest.raises(TypeError, match="unexpected keyword argument 'groop'"):
                await px.groups.describe(**anything)

    run(main())


async def type_checkers_know_parameters_and_results(px: aio.Pxrs, consumer: aio.Consumer) -> None:
    """Never called: mypy checks it. An error that it does not find is an `ignore` too many."""
    assert_type(await px.topics.list(), list[pxrs.Topic])
    assert_type(await px.topics.create("a", partitions=1, retention=0.005), pxrs.Topic)
    await px.topics.create("a", partitions="1")  # type: ignore[arg-type]
    await px.topics.create("a", 1, retain=5)  # type: ignore[call-arg]
    assert_type(await px.topics.redrive("a", to=None), int)
    assert_type(px.health(), dict[str, pxrs.Health])
    assert_type(await px.put("mail", "x", delay=1.0, connection=None), int | None)
    assert_type(await px.put_many("mail", ["x"], delay=1.0), list[int | None])
    await px.put("mail", "x", delay="soon")  # type: ignore[call-overload]
    await px.send("a", "x")  # type: ignore[call-arg]

    assert_type(await px.groups.list(), list[pxrs.GroupSummary])
    assert_type(await px.groups.describe("g", lag_seconds=False), pxrs.GroupInfo)
    await px.groups.describe("g", lag_seconds=5.0)  # type: ignore[arg-type]
    assert_type(await px.queues.rates("mail", 2.0), pxrs.QueueRates)
    await px.queues.drop("mail", id=[1])  # type: ignore[call-arg]

    reader = await px.reader("a", serde=pxrs.JSON())
    assert_type(reader, aio.Reader)
    assert_type(await reader.read(0, 0, max_records=5), list[pxrs.Message])
    async for message in reader.follow([0], start="earliest"):
        assert_type(message, pxrs.Message)

    async with px.producer(linger=0.0) as producer:
        sent = await producer.send("a", "x", "k", partition=0)
        assert_type(sent, aio.Sent)
        assert_type(await sent, pxrs.Position)
        await producer.send("a", "x", partition="0")  # type: ignore[arg-type]
        assert_type(await producer.flush(timeout=1.0), None)

    async with px.transaction(strict=True) as tx:
        assert_type(tx, aio.UnitOfWork[str | bytes])
        assert_type(await tx.take("mail", 1.0, lock_for=5.0), pxrs.Item[str | bytes] | None)
        assert_type(await tx.take_many("mail", 10), list[pxrs.Item[str | bytes]])
        assert_type(await tx.put("mail", "x", priority=1), pxrs.PutItem)
        await tx.put("mail", "x", priority="high")  # type: ignore[arg-type]
        await tx.send("a", "x", "k", headers=[("a", b"x")])
        await tx.extend("long")  # type: ignore[arg-type]
    px.transaction(strict=1)  # type: ignore[arg-type]

    assert_type(await consumer.poll(10, timeout=1.0), list[pxrs.Message])
    assert_type(await consumer.seek("a", 0, 5), None)
    await consumer.seek("a", 0, "5")  # type: ignore[arg-type]
    assert_type(consumer.health(stuck_after=1.0), pxrs.Health)
    consumer.pause("a")  # type: ignore[arg-type]


def test_connect_takes_the_same_parameters() -> None:
    blocking = inspect.signature(pxrs.connect).parameters
    assert inspect.signature(aio.connect).parameters == blocking


def test_exported_names() -> None:
    assert {kind.__name__ for _, kind in PAIRS} | ONLY_ASYNC | {"connect"} == set(aio.__all__)
    assert all(hasattr(aio, name) for name in aio.__all__)
