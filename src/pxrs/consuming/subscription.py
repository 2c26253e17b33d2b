"""Which topics a consumer wants: names, or a pattern that new topics can match later."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pxrs.config import SUFFIX, DeadLetter, OnFailure, check_topic_name
from pxrs.errors import InvalidRequest, quoted
from pxrs.topics import Topics


class Subscription:
    """One name, several, or a compiled regular expression that has to match a name whole.

    Dead-letter topics of matching topics are left out: they have messages of these topics again.
    """

    def __init__(
        self,
        wanted: str | Sequence[str] | re.Pattern[str],
        topics: Topics,
        on_failure: OnFailure | None = None,
    ) -> None:
        """`on_failure`: a run must not consume the dead letters that it writes."""
        self._topics = topics
        self._letters = on_failure if isinstance(on_failure, DeadLetter) else None
        self._pattern: re.Pattern[str] | None = None
        self._names: tuple[str, ...] = ()
        if isinstance(wanted, re.Pattern):
            if not isinstance(wanted.pattern, str):
                raise InvalidRequest(f"the pattern must be text, got {quoted(wanted.pattern)}")
            self._pattern = wanted
            return
        names = [wanted] if isinstance(wanted, str) else _listed(wanted)
        if not names:
            raise InvalidRequest("a consumer needs at least one topic")
        self._names = tuple(sorted({check_topic_name(name) for name in names}))
        for name in self._names:
            self._topics.find(name)
            if self._letters is not None:
                self._check_letters(name)

    def names(self) -> tuple[str, ...]:
        """The topics subscribed to, as of now."""
        if self._pattern is None:
            return self._names
        found = (topic.name for topic in self._topics.list())
        return tuple(sorted(name for name in found if self._matches(name, self._pattern)))

    def _matches(self, name: str, pattern: re.Pattern[str]) -> bool:
        if pattern.fullmatch(name) is None or (self._letters and name == self._letters.topic):
            return False
        source = name.removesuffix(SUFFIX)
        return source == name or pattern.fullmatch(source) is None

    def _check_letters(self, name: str) -> None:
        assert self._letters is not None
        goal = check_topic_name(self._letters.name_for(name))
        if self._letters.topic is not None and goal in self._names:
            raise InvalidRequest(
                f"dead letters would go to {goal!r}, which is consumed here: the same message "
                "would fail for ever; name another topic for them"
            )


def _listed(wanted: object) -> list[str]:
    if not isinstance(wanted, Iterable) or isinstance(wanted, bytes):
        raise InvalidRequest(
            "topics must be a name, a list of names, or a pattern of re.compile, "
            f"got {quoted(wanted)}"
        )
    return list(wanted)
