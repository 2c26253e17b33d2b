"""Which topics a consumer wants: names, or a pattern that new topics can match later."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pxrs.config import check_topic_name
from pxrs.errors import InvalidRequest
from pxrs.runtime.topics import Topics


class Subscription:
    """One name, several, or a compiled regular expression that has to match a name whole."""

    def __init__(self, wanted: str | Sequence[str] | re.Pattern[str], topics: Topics) -> None:
        self._topics = topics
        self._pattern: re.Pattern[str] | None = None
        self._names: tuple[str, ...] = ()
        if isinstance(wanted, re.Pattern):
            self._pattern = wanted
            return
        names = [wanted] if isinstance(wanted, str) else _listed(wanted)
        if not names:
            raise InvalidRequest("a consumer needs at least one topic")
        self._names = tuple(sorted({check_topic_name(name) for name in names}))
        for name in self._names:
            self._topics.find(name)

    def names(self) -> tuple[str, ...]:
        """The topics subscribed to, as of now."""
        if self._pattern is None:
            return self._names
        found = (topic.name for topic in self._topics.list())
        return tuple(sorted(name for name in found if self._pattern.fullmatch(name)))


def _listed(wanted: object) -> list[str]:
    if not isinstance(wanted, Iterable) or isinstance(wanted, bytes):
        raise InvalidRequest(
            f"topics={wanted!r}; a name is needed, a list of names, or a pattern as re.compile "
            "makes it"
        )
    return list(wanted)
