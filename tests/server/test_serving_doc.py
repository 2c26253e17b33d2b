"""The recipes of docs/serving.md run, with nothing but curl."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.child import PATIENCE
from support.node import LocalNode

pytestmark = [
    pytest.mark.engine("memory"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

SERVING = Path(__file__).parents[2] / "docs" / "serving.md"
NODE = "http://127.0.0.1:6080"


@pytest.fixture
def url() -> str:
    return "memory://"


def recipes(title: str) -> list[str]:
    """The curl commands below a heading."""
    section = re.split(r"^## ", SERVING.read_text(), flags=re.MULTILINE)
    (text,) = [each for each in section if each.startswith(f"{title}\n")]
    block = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)[0]
    return [line for line in block.splitlines() if line.startswith("curl ")]


class Shell:
    """Runs commands as a user types them; FENCE and LEASE stand for what an answer held."""

    def __init__(self, node: LocalNode) -> None:
        self._here = f"http://{node.endpoint}"
        self.known: dict[str, str] = {}

    def __call__(self, command: str) -> Any:
        for name, value in self.known.items():
            command = command.replace(name, value)
        command = command.replace(NODE, self._here)
        command = command.replace("curl ", "curl -sS --max-time 30 --fail-with-body ", 1)
        environment = {**os.environ, "url": self._here, "no_proxy": "127.0.0.1"}
        done = subprocess.run(
            ["sh", "-c", command], env=environment, capture_output=True, text=True,
            timeout=2 * PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return json.loads(done.stdout) if done.stdout else None


def test_messages_and_a_group(node: LocalNode) -> None:
    shell = Shell(node)
    create, produce, fetch = recipes("First messages")
    shell(create)
    partition = shell(produce)["positions"][0]["partition"]
    assert f"/partitions/{partition}/" in fetch
    assert [it["value"] for it in shell(fetch)["messages"]] == ["4 apples"]
    join, beat, commit, leave = recipes("A group")
    shell(join)
    owned = shell(beat)["partitions"]
    assert len(owned) == 8
    shell.known["FENCE"] = owned[partition]["fence"]
    assert shell(commit)["commits"] == [
        {"topic": "orders", "partition": partition, "checkpoint": 1, "fenced": False}
    ]
    shell(leave)
    assert shell(commit)["commits"][0]["fenced"] is True


def test_a_work_queue(node: LocalNode) -> None:
    shell = Shell(node)
    put, take, commit = recipes("A work queue")
    shell(put)
    taken = shell(take)
    assert [item["value"] for item in taken["items"]] == ["ada@example.org"]
    shell.known["LEASE"] = taken["lease"]
    shell(commit)
    assert shell(f"curl {NODE}/v1/queues/mail")["depth"] == 0
    assert shell(f"curl {NODE}/v1/queues/sent")["depth"] == 1


def test_keys_and_values(node: LocalNode) -> None:
    shell = Shell(node)
    create, get, delete = recipes("Keys and values")
    shell(create)
    shown = get.rpartition("# ")[2]
    assert shell(get) == json.loads(shown)
    shell(delete)
    with pytest.raises(AssertionError, match="404"):
        shell(get)
