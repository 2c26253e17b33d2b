"""Runs a scenario of a group: commands at the margin, what they print indented below.

topic orders 4          make a topic, or make it again
delete orders
join a orders           also: `join a orders static 10` with a rejoin timeout
leave a                 release all and say goodbye
crash a                 its session ends and it does nothing more
expire a                its session ends and it does not know yet
busy a orders/0         a handler runs; the partition is not released
idle a
look a                  see and act
see a                   read and decide …
act a                   … and act on that later, when the group may have changed
wait 0.5                time passes
revoke timeout none     or seconds; the default is 30
group                   who owns what
history                 the last move
"""

from __future__ import annotations

from collections.abc import Iterator

from pxrs.core.records import Head
from pxrs.types import TopicPartition
from support.toygroup import Process, Seen, World, finish, spell

INDENT = "    "


def rewritten(text: str) -> str:
    """The scenario with what its commands print now."""
    run = _Run()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(INDENT):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [INDENT + printed for printed in run.command(line)]
    return "\n".join(lines) + "\n"


class _Run:
    def __init__(self) -> None:
        self.world = World()
        self.processes: dict[str, Process] = {}
        self.seen: dict[str, Seen] = {}

    def command(self, line: str) -> Iterator[str]:
        verb, *words = line.split()
        handler = getattr(self, f"_{verb}")
        yield from handler(*words) or ()

    def _topic(self, name: str, partitions: str) -> None:
        self.world.make_topic(name, int(partitions))

    def _delete(self, name: str) -> None:
        del self.world.topics[name]

    def _join(self, name: str, *words: str) -> None:
        topics, wait = words, None
        if "static" in words:
            topics, wait = words[: words.index("static")], float(words[-1])
        # Under a name that is taken, the one before stays reachable as `name'`.
        if name in self.processes:
            self.processes[name + "'"] = self.processes[name]
        self.processes[name] = Process(self.world, name, topics, wait)

    def _leave(self, name: str) -> None:
        self.processes.pop(name).leave()

    def _crash(self, name: str) -> None:
        self.world.expire(self.processes.pop(name))

    def _expire(self, name: str) -> None:
        self.world.expire(self.processes[name])

    def _busy(self, name: str, part: str) -> None:
        topic, number = part.split("/")
        self.processes[name].busy.add(TopicPartition(topic, int(number)))

    def _idle(self, name: str) -> None:
        self.processes[name].busy.clear()

    def _work(self, name: str, part: str) -> Iterator[str]:
        topic, number = part.split("/")
        done = self.processes[name].work(TopicPartition(topic, int(number)))
        yield "committed" if done else "fenced"

    def _wait(self, seconds: str) -> Iterator[str]:
        self.world.now = round(self.world.now + float(seconds), 3)
        yield f"it is {self.world.now:g}"

    def _revoke(self, _timeout: str, seconds: str) -> None:
        timeout = None if seconds == "none" else float(seconds)
        self.world.rules = self.world.rules._replace(revoke_timeout=timeout)

    def _look(self, name: str) -> Iterator[str]:
        yield from self._see(name)
        yield from self._act(name)

    def _see(self, name: str) -> Iterator[str]:
        self.seen[name] = seen = finish(self.processes[name].see())
        decision = seen.decision
        words = []
        if decision.propose is not None:
            words.append(_proposal(decision.propose))
        for verb, parts in (
            ("gives away", decision.revoke),
            ("claims", decision.claim),
            ("takes by force", decision.force),
        ):
            if parts:
                words.append(f"{verb} {spell(parts)}")
        if decision.look_again_at is not None:
            words.append(f"looks again at {decision.look_again_at:g}")
        yield from words or ["nothing to do"]

    def _act(self, name: str) -> list[str]:
        return self.processes[name].act(self.seen.pop(name))

    def _group(self) -> Iterator[str]:
        world = self.world
        yield f"{world.state}, generation {world.head.generation}"
        owners: dict[str, list[TopicPartition]] = {}
        for topic in world.topics:
            for number in range(world.topics[topic].partitions):
                part = TopicPartition(topic, number)
                claim = world.claims.get(part)
                owners.setdefault((claim and claim.owner) or "~", []).append(part)
        for owner, parts in sorted(owners.items()):
            yield f"{'nobody' if owner == '~' else owner} owns {spell(parts)}"

    def _history(self) -> Iterator[str]:
        last = self.world.history[-1]
        yield f"{last.generation}: {last.reason} (by {last.coordinator})"
        for topic, number, old, new in last.moves:
            yield f"{topic} {number}: {old or 'nobody'} → {new or 'nobody'}"


def _proposal(head: Head) -> str:
    shares = [
        f"{name}: {spell(parts)}" if (parts := head.target_of(name)) else f"{name}: nothing"
        for name in sorted(head.target)
    ]
    return f"proposes {head.generation} ({head.reason}) {'; '.join(shares) or 'nothing'}"
