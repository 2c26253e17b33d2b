"""The command as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pxrs
from support.child import PATIENCE
from support.command import Run, Shell

pytestmark = pytest.mark.engine("sqlite")


def test_version_and_help(shell: Shell) -> None:
    assert shell.run("--version").stdout == f"pxrs {pxrs.__version__}\n".encode()
    shown = shell.run("--help")
    assert shown.returncode == 0
    assert b"produce" in shown.stdout


@pytest.mark.parametrize("command", ["topics", "produce", "read", "demo"])
def test_every_command_has_help_with_the_shared_options(run: Run, command: str) -> None:
    shown = run(command, "--help")
    assert shown.exit_code == 0
    assert "--url" in shown.stdout
    assert "--json" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "command", ["", "topics", "groups", "sources", "queues", "dlq", "kv", "store", "token"]
)
def test_the_list_of_commands_cuts_nothing_off(run: Run, command: str) -> None:
    listed = run(*command.split(), "--help").stdout.partition("Commands:")[2]
    assert listed
    assert not [line for line in listed.splitlines() if line.endswith("...")]


def test_help_does_not_load_what_it_does_not_need(shell: Shell) -> None:
    imported = shell.run("--help", env={**shell.environment, "PYTHONPROFILEIMPORTTIME": "1"}).stderr
    for heavy in (b"rich.", b"aiokafka", b"asyncio", b"pxrs.stores.sqlite", b"subprocess"):
        assert heavy not in imported, heavy


def test_serve_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pxrs.server.node", None)
    refused = run("serve")
    assert refused.exit_code == 1
    assert "pip install 'pxrs[broker]'" in refused.stderr


def test_an_unknown_command_is_wrong_usage(shell: Shell) -> None:
    result = shell.run("consume")
    assert (result.returncode, result.stdout) == (2, b"")


@pytest.mark.parametrize(
    "command",
    [
        "topics list", "topics describe t", "topics delete t --yes", "read t",
        "groups list", "groups describe g", "consume t --group g --timeout 1",
        "queues list", "queues describe q", "queues peek q", "queues purge q --yes", "dlq list q",
        "store copy sqlite:///{there} memory://",
    ],
)  # fmt: skip
def test_a_mistyped_path_makes_no_store(run: Run, tmp_path: Path, command: str) -> None:
    there = tmp_path / "mistyped.db"
    result = run("--url", f"sqlite:///{there}", *command.format(there=there).split())
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"there is no store at sqlite:///{there}" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_makes_no_store(run: Run, tmp_path: Path) -> None:
    result = run("doctor", f"sqlite:///{tmp_path}/mistyped.db")
    assert result.exit_code == 1
    assert "there is no store" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_during_the_imports_is_an_interrupt() -> None:
    program = (
        "import os, signal, sys\n"
        "import pxrs_command\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pxrs.errors':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "pxrs_command.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
