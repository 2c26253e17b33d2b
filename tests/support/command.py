"""The `pxrs` command as a real process, and what comes out of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from click.testing import Result

from support.child import PATIENCE

Run = Callable[..., Result]


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
            [sys.executable, "-m", "pxrs_command", *arguments],
            stdout=subprocess.PIPE,
            **{"stderr": subprocess.PIPE, "env": self.environment, **options},
        )
        self._started.append(process)
        return process

    def run(
        self, *arguments: str, stdin: bytes = b"", patience: float = PATIENCE, **options: Any
    ) -> subprocess.CompletedProcess[bytes]:
        process = self.start(*arguments, stdin=subprocess.PIPE, **options)
        out, err = process.communicate(stdin, timeout=patience)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
