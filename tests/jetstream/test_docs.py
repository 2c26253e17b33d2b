"""What docs/jetstream.md shows connects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "jetstream.md"

pytestmark = pytest.mark.engine("nats")


def test_the_examples_connect(
    url: str, etcd_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    given = {
        '"nats://host:4222"': repr(url),
        '"etcd://a:2379,b:2379,c:2379"': repr(etcd_url),
        '"nats://a:4222,b:4222,c:4222?replicas=3"': repr(f"{url}?replicas=3"),
    }
    lines = shown.splitlines()
    assert len(lines) == 2
    for line in lines:
        for place, ours in given.items():
            line = line.replace(place, ours)
        assert ":4222" not in line
        names: dict[str, Any] = {}
        exec(f"import pxrs\n{line}", names)
        with names["px"] as px:
            assert px.topics.list() == []
