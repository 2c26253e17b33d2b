"""`pxrs token`."""

from __future__ import annotations

import pytest

from support.command import Run, parsed

pytestmark = pytest.mark.engine("sqlite")


def test_create_list_rotate_revoke(run: Run, url: str) -> None:
    made = parsed(run("token", "create", "app", "--allow", "topic:orders*:read,write", "--json"))
    assert made["token"].startswith("pxrs.app.")
    listed = run("token", "list")
    assert "topic:orders*:read,write" in listed.stdout
    assert made["token"].split(".")[2] not in listed.stdout
    assert run("token", "create", "app", "--admin").exit_code == 1
    assert run("token", "create", "other", "--allow", "nonsense").exit_code == 1
    assert run("token", "rotate", "app").stdout.startswith("pxrs.app.")
    assert run("token", "revoke", "app", "--yes").exit_code == 0
    assert parsed(run("token", "list", "--json")) == []
