"""What `help` says."""

from __future__ import annotations

import inspect

import pytest

import pxrs
from pxrs import aio
from pxrs.stores.open import _OPENERS

# The same as `postgresql`.
ALIASES = {"postgres"}


@pytest.mark.parametrize("scheme", sorted(_OPENERS.keys() - ALIASES))
def test_every_url_is_named(scheme: str) -> None:
    assert f"{scheme}://" in (inspect.getdoc(pxrs.connect) or "")


@pytest.mark.parametrize("kind", [pxrs.Pxrs, aio.Pxrs, pxrs.Running, aio.Running])
def test_every_verb_has_a_docstring(kind: type) -> None:
    public = [name for name in dir(kind) if not name.startswith("_")]
    assert [name for name in public if not inspect.getdoc(getattr(kind, name))] == []
