"""`pxrs store copy` and `pxrs doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pxrs
from support.command import Run, parsed
from support.filled import BATCHES, PARTITIONS, fill

pytestmark = pytest.mark.engine("sqlite")


def test_copy_and_verify(run: Run, url: str, tmp_path: Path) -> None:
    fill(url)
    target = f"sqlite:///{tmp_path}/to.db"
    first = run("store", "copy", url, target)
    assert first.exit_code == 0, first.stderr
    assert first.stdout.splitlines()[-1] == (
        f"verified: sqlite:///{tmp_path}/to.db is equal to sqlite:///{tmp_path}/cli.db"
    )
    again = parsed(run("store", "copy", url, target, "--json"))
    assert (again["complete"], again["only_verified"], again["differences"]) == (True, True, [])
    assert sum(part["end"] for part in again["partitions"]) == PARTITIONS * BATCHES + 1


def test_what_was_used_since_is_told(run: Run, url: str, tmp_path: Path) -> None:
    fill(url, queues=False)
    target = f"sqlite:///{tmp_path}/to.db"
    run("store", "copy", url, target)
    with pxrs.connect(target) as px, px.producer() as producer:
        producer.send("orders", b"new", partition=0).result()
    used = run("store", "copy", url, target)
    assert used.exit_code == 1
    assert "partition 0 of topic 'orders'" in used.stdout
    assert "was complete once" in used.stderr


def test_an_occupied_target_is_refused(run: Run, px: pxrs.Pxrs, url: str, tmp_path: Path) -> None:
    target = f"sqlite:///{tmp_path}/to.db"
    run("topics", "create", "mine", "--partitions", "1", "--url", target)
    refused = run("store", "copy", url, target, "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stderr)["error"]["type"] == "CopyRefused"


def test_doctor(run: Run, px: pxrs.Pxrs, url: str) -> None:
    shown = run("doctor", url)
    assert shown.exit_code == 0, shown.stderr
    assert "every commit is synced" in shown.stdout
    relaxed = f"{url}?durability=relaxed"
    assert run("doctor", relaxed).exit_code == 0
    assert run("doctor", relaxed, "--strict").exit_code == 1
    document = parsed(run("doctor", "--json"))
    assert document["places"][0]["place"] == url
    broken = run("doctor", "nonsense://a", "--json")
    assert broken.exit_code == 1
    assert json.loads(broken.stdout)["worst"] == "problem"
