"""What docs/remote.md and docs/client.md show runs, against real nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import pxrs
from support.child import PATIENCE
from support.node import LocalNode, free_port

pytestmark = pytest.mark.engine("sqlite")

DOCS = Path(__file__).parents[2] / "docs"


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def test_the_examples_of_a_client_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = f"sqlite:///{tmp_path}/app.db"
    connecting, following = blocks("client.md", "python")
    with ExitStack() as stack:
        nodes = [stack.enter_context(LocalNode(store, node_id=name)) for name in "abc"]
        url = f"pxrs://{','.join(node.address for node in nodes)}"
        assert "pxrs://a:6080,b:6080,c:6080" in connecting
        exec(connecting.replace("pxrs://a:6080,b:6080,c:6080", url), {})
        assert "epoch" not in capsys.readouterr().err
        with pxrs.connect(url) as px:
            assert px.kv.get("user:1").value == b"Ada Lovelace"  # type: ignore[union-attr]
            names: dict[str, Any] = {"px": px}
            exec(following, names)
            names["end"]()


@pytest.mark.long
@pytest.mark.thorough
def test_the_commands_of_a_remote_store_run(tmp_path: Path) -> None:
    serving, token = blocks("remote.md", "sh")
    port = free_port()
    # The commands wait until the node is there.
    serving = serving.replace("6080", str(port)).replace(
        "&\n", "& node=$!\ntrap 'kill $node' EXIT\n", 1
    )
    # `$!` is the node itself, and not a shell around it.
    command = tmp_path / "pxrs"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pxrs_command "$@"\n')
    command.chmod(0o755)
    script = f"""
        {serving}
        {token}
    """
    result = subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    assert "orders" in result.stdout
    assert "pxrs.billing." in result.stdout
