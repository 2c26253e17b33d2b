"""Coordination from one place, logs from another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, cast

from pxrs.errors import ConfigError, NotAtomic
from pxrs.stores.api import Atomic, CoordStore, KeepsOwners, LogStore, QueueStore
from pxrs.stores.identity import identity_of
from pxrs.urls import public

NO_MESSAGES = (
    "{0} keeps no messages; say where they are kept: '{0} log=nats://host:4222', "
    "or log=sqlite:///app.db on one host"
)


class NoLog:
    """Stands for a `LogStore` where there is none: coordination and queues work without it."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __getattr__(self, name: str) -> NoReturn:
        raise ConfigError(NO_MESSAGES.format(public(self._url)))


class CompositeStores:
    """`Stores` put together. `atomic`: how all but the messages commit as one, where they can."""

    def __init__(
        self,
        url: str,
        coord: CoordStore,
        log: LogStore | None,
        queues: QueueStore | None,
        close: Sequence[Callable[[], None]],
        atomic: Callable[[Any], AbstractContextManager[Atomic]] | None = None,
    ) -> None:
        self.url = url
        self.coord = coord
        if log is not None and isinstance(log, KeepsOwners):
            log.owned_by(partial(identity_of, coord))
        self.log = log or cast(LogStore, NoLog(url))
        self._queues = queues
        self._close = list(close)
        self._atomic = atomic

    @property
    def queues(self) -> QueueStore:
        """The queues of the coordination store: held items are bound to its sessions."""
        if self._queues is None:
            raise ConfigError(
                f"{public(self.url)} has no queues, because its coordination store has none; "
                "open a second connection to a database for them"
            )
        return self._queues

    def atomic(self, connection: Any = None) -> AbstractContextManager[Atomic]:
        """Commit coordination and queues together, if the engine can; messages take no part."""
        if self._atomic is not None:
            return self._atomic(connection)
        raise NotAtomic(
            f"{public(self.url)} keeps coordination and messages in different places, which "
            "can't commit together; commit the checkpoint after the handler, or keep all "
            "in one database"
        )

    def close(self) -> None:
        """Close the parts, all of them even if one fails."""
        while self._close:
            close = self._close.pop()
            try:
                close()
            except BaseException:
                self.close()
                raise
