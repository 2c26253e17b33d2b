"""Objects that were made before a fork: only the parent process may use them.

A forked child has copies of the parent's locks, sockets and files, but none of its threads. So
stores, producers and all other objects that own one of these refuse to work in a child, and close
what the child must not keep open. `Origin` is the one place where that is decided.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

from pxrs.errors import Closed

# How many forks lie between the first process and this one. Asking the kernel for the process id
# costs a system call, and every put would make one.
_forks = 0
_origins: weakref.WeakSet[Origin] = weakref.WeakSet()


class Origin:
    """Remembers which process made an object; a part of that object."""

    __slots__ = ("__weakref__", "_abandons", "_forks", "message")

    def __init__(self, what: str = "store") -> None:
        self.message = f"this {what} was opened before a fork; open it again in the child"
        self._forks = _forks
        self._abandons: list[weakref.WeakMethod[Callable[[], None]]] = []

    def on_fork(self, abandon: Callable[[], None]) -> None:
        """Call a method in forked children, in the order of registration, until `close`.

        It must not wait for a lock: the thread that held it is not there. Keeps nothing alive.
        """
        self._abandons.append(weakref.WeakMethod(abandon))
        _origins.add(self)

    def close(self) -> None:
        """Stop calling methods in forked children: nothing is left to close there."""
        _origins.discard(self)

    @property
    def is_parent(self) -> bool:
        """Whether another process made the object, and this one was forked from it."""
        return self._forks != _forks

    def refuse_child(self) -> None:
        """Raise `Closed` in a process that was forked from the one that made the object."""
        if self._forks != _forks:
            raise Closed(self.message)

    def _abandon(self) -> None:
        for found in self._abandons:
            if (abandon := found()) is not None:
                abandon()


def _after_fork_in_child() -> None:
    global _forks
    _forks += 1
    for origin in list(_origins):
        origin._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
