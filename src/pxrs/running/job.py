"""What `px.run` was asked to do, as a value: for threads here, or for other processes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from pxrs.config import (
    ConsumerSettings,
    DeadLetter,
    OnFailure,
    OnTrimmed,
    Parallel,
    RunnerSettings,
    Start,
    Stop,
    Strategy,
)
from pxrs.consuming.health import Health
from pxrs.core.retry import Backoff
from pxrs.errors import ConfigError
from pxrs.running.inside import employer
from pxrs.running.signals import stop_on_signals
from pxrs.serde import Serde, check_serde
from pxrs.types import Message

Handler = Callable[[Message], Any]
# How long closing a store waits for handlers.
_PATIENCE = 30.0


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
    """The arguments of `run`."""

    handler: Handler
    topic: str | Sequence[str] | re.Pattern[str]
    group: str
    workers: int
    processes: int
    parallel: Parallel
    retry: Backoff
    on_failure: OnFailure
    max_in_flight: int
    max_handler_time: float | None
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
    serde: Serde | None
    key_serde: Serde | None

    def __post_init__(self) -> None:
        # What is found only when the first handler fails is found by nobody.
        _instance_of("retry", self.retry, Backoff, "pxrs.Backoff(attempts=5)")
        _instance_of(
            "on_failure", self.on_failure, (DeadLetter, Stop), "pxrs.DeadLetter() or pxrs.Stop()"
        )
        check_serde(self.serde, "serde")
        check_serde(self.key_serde, "key_serde")
        processes: object = self.processes
        if not isinstance(processes, int) or isinstance(processes, bool) or processes < 0:
            raise ConfigError(
                f"processes={processes!r}; a whole number is needed, 0 for threads in this process"
            )

    def arguments(self, number: int) -> dict[str, Any]:
        """For the `run` of worker process `number`."""
        arguments = msgspec.structs.asdict(self)
        arguments["processes"] = 0
        if self.instance is not None:
            arguments["instance"] = f"{self.instance}-{number}"
        return arguments

    def running(self) -> RunnerSettings:
        """What the runner has to know."""
        return RunnerSettings(
            group=self.group,
            workers=self.workers,
            parallel=self.parallel,
            max_in_flight=self.max_in_flight,
            max_handler_time=self.max_handler_time,
        )

    def consuming(self, member_name: str, client: str) -> ConsumerSettings:
        """What its consumer has to know."""
        return ConsumerSettings(
            group=self.group,
            member_name=member_name,
            instance=self.instance is not None,
            client=client,
            auto_commit_interval=self.auto_commit_interval,
            start=self.start,
            on_trimmed=self.on_trimmed,
            prefetch_bytes=self.prefetch_bytes,
            stuck_after=self.stuck_after,
            session_ttl=self.session_ttl,
            debounce=self.debounce,
            revoke_timeout=self.revoke_timeout,
            rejoin_timeout=self.rejoin_timeout,
            strategy=self.strategy,
        )


def _instance_of(name: str, value: object, kinds: type | tuple[type, ...], example: str) -> None:
    if not isinstance(value, kinds):
        raise ConfigError(f"{name}={value!r}; {example} is meant")
