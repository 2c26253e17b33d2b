"""Interleaved rounds, medians, and ratios that are taken within a round.

The machine may be twice as fast in one minute as in the next. So contestants take turns,
each round yields its own ratios, and the median of those ratios is what counts.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How much to run. `quick` shrinks what has a fixed size of its own."""

    messages: int
    rounds: int
    quick: bool
    folder: Path | None = None


@dataclass(frozen=True)
class Sample:
    """What one run of a contestant did, setting up and checking not included."""

    count: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.count / self.seconds


@dataclass(frozen=True)
class Contestant:
    """`run` gets an empty folder of its own and times itself."""

    name: str
    run: Callable[[Path], Sample]
    note: str = ""


@dataclass(frozen=True)
class Check:
    """A figure beside its target. `value` is None when it could not be measured.

    A ratio has no unit.
    """

    name: str
    value: float | None
    target: float
    unit: str
    sense: Literal["at least", "at most"] = "at most"

    @property
    def ok(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.target if self.sense == "at least" else self.value <= self.target


@dataclass
class Comparison:
    """Rates per contestant and round. One that failed has its reason instead."""

    title: str
    contestants: Sequence[Contestant]
    rates: dict[str, list[float]]
    failures: dict[str, str] = field(default_factory=dict)

    def rate(self, name: str) -> float | None:
        return median(self.rates[name]) if name not in self.failures else None

    def ratio(self, name: str, other: str) -> float | None:
        """Median over the rounds of `name`'s rate divided by `other`'s in the same round."""
        if name in self.failures or other in self.failures:
            return None
        pairs = zip(self.rates[name], self.rates[other], strict=True)
        return median(mine / theirs for mine, theirs in pairs)

    def cost(self, name: str, other: str) -> float | None:
        """Median over the rounds of `name`'s time per item divided by `other`'s."""
        return self.ratio(other, name)

    def spread(self, name: str) -> float:
        """The fastest round over the slowest: how noisy the machine was."""
        return max(self.rates[name]) / min(self.rates[name])


@dataclass
class Section:
    """What a part of a benchmark found."""

    comparisons: list[Comparison] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    @property
    def broken(self) -> bool:
        """Something could not be measured at all; a missed target is not that."""
        return bool(self.failure) or any(each.failures for each in self.comparisons)


def compare(
    title: str, contestants: Sequence[Contestant], rounds: int, options: Options, say: Say
) -> Comparison:
    """Run all in turn, `rounds` times after one round that does not count.

    Each round starts with another contestant, so that none always follows the same one. A
    contestant that fails is left out from then on and reported; the others go on.
    """
    result = Comparison(title, contestants, {each.name: [] for each in contestants})
    for number in range(rounds + 1):
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            if contestant.name in result.failures:
                continue
            say(
                f"{title}: {f'round {number}/{rounds}' if number else 'warm-up'}, {contestant.name}"
            )
            try:
                sample = once(contestant, options)
            except Exception as error:
                result.failures[contestant.name] = f"{type(error).__name__}: {error}"
            else:
                if number:
                    result.rates[contestant.name].append(sample.rate)
    return result


def once(contestant: Contestant, options: Options) -> Sample:
    """One run in a fresh folder, without the garbage of the run before."""
    with scratch(options) as name:
        gc.collect()
        return contestant.run(Path(name))


def scratch(options: Options) -> tempfile.TemporaryDirectory[str]:
    """An empty folder on the disk under test, gone with the block."""
    return tempfile.TemporaryDirectory(prefix="pxrs-bench-", dir=options.folder)
