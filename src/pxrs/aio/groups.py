"""Groups seen from outside, for asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pxrs.aio.threads import Threads
from pxrs.groups import admin as blocking
from pxrs.groups.admin import Target
from pxrs.groups.info import CheckpointChange, GroupHistory, GroupInfo, GroupSummary


class Groups:
    """Lists, describes, explains, resets and deletes groups. See `pxrs.Groups`."""

    def __init__(self, groups: blocking.Groups, threads: Threads) -> None:
        self._groups = groups
        self._threads = threads

    async def list(self) -> list[GroupSummary]:
        """All groups, by name."""
        return await self._threads.call(self._groups.list)

    async def describe(self, group: str, *, lag_seconds: bool = True) -> GroupInfo:
        """The group's members and partitions, and how far behind it is."""
        return await self._threads.call(
            partial(self._groups.describe, group, lag_seconds=lag_seconds)
        )

    async def explain(self, group: str, limit: int = 20) -> GroupHistory:
        """What happened to the group: its last generations, and its last resets and seeks."""
        return await self._threads.call(partial(self._groups.explain, group, limit))

    async def reset(
        self,
        group: str,
        topic: str,
        *,
        to: Target | None = None,
        timestamp_ms: int | None = None,
        partitions: Sequence[int] | None = None,
        force: bool = False,
    ) -> tuple[CheckpointChange, ...]:
        """Set the group's checkpoints in a topic. See `pxrs.Groups.reset`."""
        return await self._threads.call(
            partial(
                self._groups.reset,
                group,
                topic,
                to=to,
                timestamp_ms=timestamp_ms,
                partitions=partitions,
                force=force,
            )
        )

    async def delete(self, group: str, *, force: bool = False) -> None:
        """Forget a group. See `pxrs.Groups.delete`."""
        await self._threads.call(partial(self._groups.delete, group, force=force))
