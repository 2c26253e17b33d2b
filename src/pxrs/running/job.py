"""The arguments of `px.run` and `px.listen`, checked, as values: for threads or other processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

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
from pxrs.core.retry import Backoff, check_retry
from pxrs.errors import ConfigError, quoted
from pxrs.options import ListenOptions, MemberOptions, RunOptions, filled, refuse_unknown
from pxrs.serde import Serde, check_serde
from pxrs.types import Message

MessageHandler = Callable[[Message], Any]
_SHORTEST_DEADLINE = 0.05


class RunJob(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `run`. `member`: those of its consumer."""

    handler: MessageHandler
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
        _check(self)
        check_at_least_one("max_in_flight", self.max_in_flight)
        check_one_of("parallel", self.parallel, ("partition", "key"))
        if self.max_handler_time is not None:
            check_seconds("max_handler_time", self.max_handler_time, 0.001)
        check_serde(self.key_serde, "key_serde")

    @property
    def name(self) -> str:
        """Its name in health and logs."""
        return f"run:{self.group}"

    def in_process(self, number: int) -> RunJob:
        """The job of worker process `number`; each is a member of its own."""
        member = self.member
        if (instance := member.get("instance")) is not None:
            member = {**member, "instance": f"{instance}-{number}"}
        return msgspec.structs.replace(self, processes=0, member=member)


class ListenJob(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `listen`."""

    queue: str
    handler: Callable[..., Any]
    workers: int = 1
    processes: int = 0
    retry: Backoff = Backoff(first=0.5, longest=60.0, attempts=5)
    on_failure: OnFailure = DeadLetter()
    deadline: float | None = None
    max_handler_time: float | None = None
    serde: Serde | None = None

    def __post_init__(self) -> None:
        _check(self)
        for name in ("deadline", "max_handler_time"):
            seconds: float | None = getattr(self, name)
            if seconds is not None:
                check_seconds(name, seconds, _SHORTEST_DEADLINE)
        if isinstance(self.on_failure, DeadLetter) and self.on_failure.topic is not None:
            raise ConfigError(
                "on_failure=DeadLetter() takes no name in listen: a queue keeps its dead items "
                f"itself, and px.queues.dead shows them; got {self.on_failure.topic!r}"
            )

    @property
    def name(self) -> str:
        """Its name in health and logs."""
        return f"listen:{self.queue}"

    @property
    def lock_for(self) -> float | None:
        """For how many seconds an item is held at first; None: while this process lives."""
        limits = [limit for limit in (self.deadline, self.max_handler_time) if limit is not None]
        return min(limits, default=None)

    def in_process(self, number: int) -> ListenJob:
        """The job of worker process `number`."""
        return msgspec.structs.replace(self, processes=0)


Job = RunJob | ListenJob


def run_job(
    handler: MessageHandler,
    topic: str | Sequence[str] | re.Pattern[str],
    group: str,
    serde: Serde | None,
    options: RunOptions,
) -> RunJob:
    """Checks the arguments of `run`."""
    refuse_unknown("run", options, RunOptions)
    member = {name: it for name, it in options.items() if name not in RunJob.__struct_fields__}
    return filled(
        RunJob, options, handler=handler, topic=topic, group=group, serde=serde, member=member
    )


def listen_job(
    queue: str, handler: Callable[..., Any], serde: Serde | None, options: ListenOptions
) -> ListenJob:
    """Checks the arguments of `listen`."""
    refuse_unknown("listen", options, ListenOptions)
    return filled(ListenJob, options, queue=queue, handler=handler, serde=serde)


def _check(job: Job) -> None:
    """Checks the options of both: a mistake that shows only at the first failure is found late."""
    check_retry(job.retry)
    if not isinstance(job.on_failure, (DeadLetter, Stop)):
        raise ConfigError(
            f"on_failure must be pxrs.DeadLetter() or pxrs.Stop(), got {quoted(job.on_failure)}"
        )
    check_at_least_one("workers", job.workers)
    check_serde(job.serde, "serde")
    processes: object = job.processes
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 0:
        raise ConfigError(
            f"processes must be an integer, 0 for threads in this process; got {quoted(processes)}"
        )
