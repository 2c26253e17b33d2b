"""Fixtures for users of pxrs; pytest finds them by itself. See docs/testing.md.

Every run of pytest where pxrs is installed imports this module, so it imports nothing of pxrs
before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pxrs import Pxrs
    from pxrs.testing import GroupLab


@pytest.fixture
def pxrs_lab() -> Iterator[GroupLab]:
    """A consumer group in one thread and on a virtual clock, whose members can be killed."""
    from pxrs.testing import GroupLab

    with GroupLab() as lab:
        yield lab


@pytest.fixture
def px_memory() -> Iterator[Pxrs]:
    """An open store in memory, empty and this test's own."""
    import pxrs

    with pxrs.connect("memory://") as px:
        yield px
