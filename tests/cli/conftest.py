"""A store in a temp folder, and two ways to run the command: in this process, and for real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import pxrs
from pxrs.cli.main import cli
from support.command import Run, Shell


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/cli.db"


@pytest.fixture
def px(url: str) -> Iterator[pxrs.Pxrs]:
    with pxrs.connect(url) as px:
        yield px


@pytest.fixture
def run(url: str) -> Run:
    """`run("topics", "list")`, in this process."""

    def run(*arguments: str, stdin: bytes | None = None) -> Result:
        result = CliRunner(env={"PXRS_URL": url}).invoke(cli, arguments, input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def shell(url: str) -> Iterator[Shell]:
    shell = Shell(url)
    yield shell
    shell.close()
