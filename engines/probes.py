"""Small questions to a node that may not be up yet: no answer is a no."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from engines.places import HOST

_PATIENCE = 2.0


def http_says(port: int, path: str, wanted: str) -> bool:
    """Whether a GET is answered with 200 and a body that holds the text."""
    connection = http.client.HTTPConnection(HOST, port, timeout=_PATIENCE)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status == 200 and wanted in answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def tcp_says(port: int, question: bytes, wanted: bytes) -> bool:
    """Whether the answer to a line holds the text."""
    try:
        with socket.create_connection((HOST, port), timeout=_PATIENCE) as connection:
            connection.settimeout(_PATIENCE)
            connection.sendall(question)
            answer = b""
            while wanted not in answer and (part := connection.recv(4096)):
                answer += part
    except OSError:
        return False
    return wanted in answer


def version_of(program: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """The first word of what it prints that looks like a version."""
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, env={**os.environ, **(env or {})}
    )
    for word in (done.stdout + done.stderr).replace(",", " ").replace("v=", " ").split():
        plain = word.lstrip("v").split("-")[0]
        if plain[:1].isdigit() and "." in plain:
            return plain
    return "?"
