"""Coordination from one place, logs from another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from pxrs.config import public
from pxrs.errors import ConfigError, NotAtomic
from pxrs.stores.api import CoordStore, LogStore, QueueStore

NO_MESSAGES = (
    "{0} keeps no messages; say where they are kept: '{0} log=nats://host:4222', "
    "or log=sqlite:///app.db on one host"
)


class NoLog:
    """Stands for a `LogStore` where there is none: coordination and queues do without."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __getattr__(self, name: str) -> NoReturn:
        raise ConfigError(NO_MESSAGES.format(public(self._url)))


class CompositeStores:
    """`Stores` put together. Each part commits by itself: there is no commit across them."""

    def __init__(
        self,
        url: str,
        coord: CoordStore,
        log: LogStore | None,
        queues: QueueStore | None,
        close: Sequence[Callable[[], None]],
    ) -> None:
        self.url = url
        self.coord = coord
        self.log = log or cast(LogStore, NoLog(url))
        self._queues = queues
        self._close = list(close)

    @property
    def queues(self) -> QueueStore:
        """Beside the coordination: what is held is bound to its sessions."""
        if self._queues is None:
            raise ConfigError(
                f"{public(self.url)}: queues are kept where coordination is, and there are none "
                "there; open a second connection to a database for them"
            )
        return self._queues

    def atomic(self, connection: Any = None) -> NoReturn:
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
