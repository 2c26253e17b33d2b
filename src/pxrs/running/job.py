"""What `px.run` and `px.listen` were asked to do, as values: for threads, or other processes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from pxrs.config import (
    DeadLetter,
    OnFailure,
    Parallel,
    Stop,
    check_at_least_one,
    check_one_of,
    check_seconds,
)
from pxrs.consuming.health import Health
from pxrs.core.delivery import ConsumeTimes, Policy, check_policy
from pxrs.core.retry import Backoff
from pxrs.errors import ConfigError
from pxrs.options import MemberOptions, RunOptions, filled, refuse_unknown
from pxrs.running.inside import employer
from pxrs.running.signals import stop_on_signals
from pxrs.serde import Serde, check_serde
from pxrs.types import Message

Handler = Callable[[Message], Any]
# How long closing a store waits for handlers.
_PATIENCE = 30.0
DEFAULT_POLICY = ConsumeTimes(5, Backoff(first=0.5, longest=60.0))
_SHORTEST_DEADLINE = 0.05


class Running(Protocol):
    """A run that was made and can be begun once."""

    def run(self) -> None:
        """Work until stopped; raises what made it stop by itself."""
        ...

    def stop(self) -> None:
        """Finish what is in hand and end. From any thread; before `run`, too."""
        ...

    def health(self) -> dict[str, Health]:
        """How its parts are doing that have no consumer here to tell. From any thread."""
        ...


class Begun:
    """A run, and its end: whoever closes the store waits until what is in hand was committed.

    Signals in the main thread stop it, and with it all that `stop_all` stops.
    """

    def __init__(self, running: Running, stop_all: Callable[[], None]) -> None:
        self._running = running
        self._stop_all = stop_all
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        self._thread = threading.current_thread()
        try:
            # To the very end: a second signal must not cut off what is being finished.
            with stop_on_signals(self._stop_all):
                self._running.run()
        finally:
            self._ended.set()

    def stop(self) -> None:
        self._running.stop()

    def health(self) -> dict[str, Health]:
        """As `Running.health`; nothing once it has ended."""
        return {} if self._ended.is_set() else self._running.health()

    @property
    def is_around_here(self) -> bool:
        """Whether this is code that the run calls: then it can't wait for the run."""
        return self._thread is threading.current_thread() or employer() is self._running

    def join(self) -> None:
        """Wait for its end, for a while."""
        if self._thread is not None:
            self._ended.wait(_PATIENCE)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `run`. `member`: those of its consumer."""

    handler: Handler
    topic: str | Sequence[str] | re.Pattern[str]
    group: str
    member: MemberOptions
    workers: int = 1
    processes: int = 0
    parallel: Parallel = "partition"
    retry: Backoff = Backoff(attempts=5)
    on_failure: OnFailure = DeadLetter()
    max_in_flight: int = 1000
    max_handler_time: float | None = None
    serde: Serde | None = None
    key_serde: Serde | None = None

    def __post_init__(self) -> None:
        # What is found only when the first handler fails is found by nobody.
        _instance_of("retry", self.retry, Backoff, "pxrs.Backoff(attempts=5)")
        _instance_of(
            "on_failure", self.on_failure, (DeadLetter, Stop), "pxrs.DeadLetter() or pxrs.Stop()"
        )
        check_at_least_one("workers", self.workers)
        check_at_least_one("max_in_flight", self.max_in_flight)
        check_one_of("parallel", self.parallel, ("partition", "key"))
        if self.max_handler_time is not None:
            check_seconds("max_handler_time", self.max_handler_time, 0.001)
        check_serde(self.serde, "serde")
        check_serde(self.key_serde, "key_serde")
        processes: object = self.processes
        if not isinstance(processes, int) or isinstance(processes, bool) or processes < 0:
            raise ConfigError(
                f"processes={processes!r}; a whole number is needed, 0 for threads in this process"
            )

    def arguments(self, number: int) -> dict[str, Any]:
        """For the `run` of worker process `number`."""
        arguments = msgspec.structs.asdict(self) | {"processes": 0}
        arguments |= arguments.pop("member")
        if arguments.get("instance") is not None:
            arguments["instance"] += f"-{number}"
        return arguments


def job_of(
    handler: Handler,
    topic: str | Sequence[str] | re.Pattern[str],
    group: str,
    options: RunOptions,
) -> Job:
    """What `run` was called with, checked."""
    refuse_unknown("run", options, RunOptions)
    member = {name: it for name, it in options.items() if name not in Job.__struct_fields__}
    return filled(Job, options, handler=handler, topic=topic, group=group, member=member)


class ListenerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a listener is told. `deadline`: seconds an item is held, extended while it is handled.

    `max_handler_time`: after that it is not extended any more, and others get the item.
    """

    queue: str
    workers: int = 1
    processes: int = 0
    policy: Policy = DEFAULT_POLICY
    deadline: float | None = None
    max_handler_time: float | None = None

    def __post_init__(self) -> None:
        check_policy(self.policy)
        if type(self.workers) is not int or self.workers < 1:
            raise ConfigError(f"workers = {self.workers!r}; one at least is needed")
        if self.deadline is not None and not self.deadline >= _SHORTEST_DEADLINE:
            raise ConfigError(f"deadline = {self.deadline}; {_SHORTEST_DEADLINE} s at least")
        if self.max_handler_time is not None and self.deadline is None:
            raise ConfigError("max_handler_time needs a deadline: that is what is not extended")


def _instance_of(name: str, value: object, kinds: type | tuple[type, ...], example: str) -> None:
    if not isinstance(value, kinds):
        raise ConfigError(f"{name}={value!r}; {example} is meant")
