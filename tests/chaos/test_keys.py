"""Keys and values on three nodes that are killed, frozen, restarted and joined by a fourth.

Clients write and read all the time, over `pxrs://`, gRPC and HTTP. What they were told is
linearizable, every acknowledged put is there or was overwritten, a version is compared with
successfully once, and what is repeated with an idempotency key happens once.

`PXRS_ROUNDS=10 ./run test tests/chaos/test_keys.py` goes on for longer, with other seeds and on
etcd too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import broken_keys
from support.keys_history import Did
from support.keys_nodes import World

pytestmark = [pytest.mark.long, pytest.mark.thorough]

ROUNDS = int(os.environ.get("PXRS_ROUNDS", "1"))
ENGINES = ["sqlite", "postgres"] if ROUNDS == 1 else ["sqlite", "postgres", "etcd"]

# What happens to a broken node, at most so often, until it is caught.
TRIES = 5


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.engine(name)) for name in ENGINES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shared.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


@contextmanager
def world_of(store: str, **options: Any) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(store, stack, **options)


def test_what_clients_were_told_is_true(store: str) -> None:
    for seed in range(ROUNDS):
        with world_of(store, seed=seed) as world:
            happens = [world.kill, world.freeze, world.restart, world.join]
            world.rng.shuffle(happens)
            for each in happens:
                each()
            broken = world.finish()
            tell(world, broken)
            assert not broken, f"seed {seed}: " + "\n".join(broken)


class Mutant(NamedTuple):
    """A broken node, what happens to it, and the words of the verdicts of which one has to fall."""

    broken: Callable[[], None]
    happens: Callable[[World], None]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return self.broken.__name__


NO_ORDER, NOT_RISING = "not linearizable", "versions do not rise"
TWICE, SHARED = "happened twice", "is the version of"
MUTANTS = [
    Mutant(broken_keys.reads_from_memory_while_it_leads, World.freeze, (NO_ORDER,)),
    Mutant(broken_keys.does_not_check_the_head, World.freeze, (NOT_RISING, SHARED)),
    Mutant(broken_keys.forgets_idempotency_keys, World.go_on, (TWICE,)),
    Mutant(broken_keys.answers_before_it_commits, World.go_on, (NO_ORDER,)),
    Mutant(broken_keys.begins_to_count_again, World.freeze, (NOT_RISING,)),
    # What is done twice, and was overwritten in between, may only show as an order that can't be.
    Mutant(broken_keys.forgets_writers, World.go_on, (TWICE, NO_ORDER)),
]


@pytest.mark.engine("sqlite")
def test_answers_that_are_lost_harm_nobody(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/shared.db"
    with world_of(store, nodes=("node-0", "node-1"), broken=broken_keys.loses_answers) as world:
        world.go_on()
        world.kill()
        broken = world.finish()
        tell(world, broken)
        assert not broken, "\n".join(broken)


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_broken_nodes_are_caught(mutant: Mutant, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/shared.db"
    two = ("node-0", "node-1")
    with world_of(store, nodes=two, broken=mutant.broken, session_ttl=1) as world:
        for _ in range(TRIES):
            mutant.happens(world)
            heard = world.broken_so_far()
            if any(words in said for said in heard for words in mutant.words):
                print(heard[0])
                return
        tell(world, heard)
    pytest.fail(f"not caught; what was said: {heard[:5]}")


def tell(world: World, broken: list[str]) -> None:
    """What the run was like: pytest shows it with -s, or when it fails."""
    history = world.history.so_far()
    keys = {said.partition(":")[0] for said in broken}
    for did in sorted(history, key=attrgetter("called")):
        if did.key in keys:
            print(did)
    print("\n".join(world.events))
    print(f"after a SIGKILL the next put took {[f'{it:.2f} s' for it in world.fail_overs]}")
    for kind in ("pxrs", "rpc", "rest"):
        print(f"{kind}: {counts([did for did in history if did.client.startswith(kind)])}")


def counts(dids: list[Did]) -> str:
    slowest = max(did.took for did in dids)
    outcomes = {did.outcome for did in dids}
    numbers = {it: sum(did.outcome == it for did in dids) for it in sorted(outcomes)}
    return f"{len(dids)} operations, {numbers}, the slowest took {slowest:.2f} s"
