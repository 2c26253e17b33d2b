"""A store in a temp folder, and two ways to run the command: in this process, and for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import pxrs
from pxrs.cli.main import cli

PATIENCE = 60.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/cli.db"


@pytest.fixture
def px(url: str) -> Iterator[pxrs.Pxrs]:
    with pxrs.connect(url) as px:
        yield px


Run = Callable[..., Result]


@pytest.fixture
def run(url: str) -> Run:
    """`run("topics", "list")`, in this process."""

    def run(*arguments: str, stdin: bytes | None = None) -> Result:
        result = CliRunner(env={"PXRS_URL": url}).invoke(cli, arguments, input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def parsed(result: Result) -> Any:
    """The one JSON document on stdout."""
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


class Shell:
    """Real processes of the command; none is left behind."""

    def __init__(self, url: str) -> None:
        self.environment = {**os.environ, "PXRS_URL": url}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "pxrs.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **{"env": self.environment, **options},
        )
        self._started.append(process)
        return process

    def run(
        self, *arguments: str, stdin: bytes = b"", **options: Any
    ) -> subprocess.CompletedProcess[bytes]:
        process = self.start(*arguments, stdin=subprocess.PIPE, **options)
        out, err = process.communicate(stdin, timeout=PATIENCE)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def shell(url: str) -> Iterator[Shell]:
    shell = Shell(url)
    yield shell
    shell.close()
