"""An engine of one or several nodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from engines.places import free_ports, new_folder
from engines.process import Command, DiedEarly, Process

_TAKEN = ("in use", "eaddrinuse", "could not bind", "can't start server: bind")


@dataclass(frozen=True)
class Plan:
    """What an engine's module knows: `prepare` makes a new data folder and the commands.

    It is called again with other ports when one was taken by somebody else.
    """

    name: str
    version: str
    origin: str
    ports: int
    prepare: Callable[[Path, Sequence[int]], list[Command]]
    url: Callable[[Sequence[int]], str]


class Engine:
    """Nodes that are started, stopped, killed and started again on the same data and ports."""

    def __init__(self, plan: Plan) -> None:
        self.name = plan.name
        self.version = plan.version
        self.origin = plan.origin
        self._plan = plan
        self.folder = Path()
        self.ports: list[int] = []
        self.nodes: list[Process] = []

    @property
    def url(self) -> str:
        """What pxrs, or the engine's own client, connects to."""
        return self._plan.url(self.ports)

    def start(self) -> None:
        """Start all nodes; returns when they can be used."""
        if self.nodes:
            for node in self.nodes:
                if not node.running:
                    node.launch()
            self._await_all()
            return
        try:
            self._start_new()
        except DiedEarly as error:
            self.close()
            if not any(word in str(error).lower() for word in _TAKEN):
                raise
            self._start_new()

    def stop(self, node: int | None = None) -> None:
        """End all nodes, or one, in an orderly way."""
        for each in self._chosen(node):
            each.stop()

    def kill(self, node: int | None = None) -> None:
        """kill -9 of all nodes, or of one."""
        for each in self._chosen(node):
            each.kill()

    def restart(self, node: int | None = None) -> None:
        """Stop what still runs and start again, on the same data and ports."""
        chosen = self._chosen(node)
        for each in chosen:
            each.stop()
        for each in chosen:
            each.launch()
        for each in chosen:
            each.await_ready()

    def close(self) -> None:
        """End it and remove its data."""
        for each in self.nodes:
            each.end()
        self.nodes = []
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = Path()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start_new(self) -> None:
        self.ports = free_ports(self._plan.ports)
        self.folder = new_folder(self.name)
        commands = self._plan.prepare(self.folder, self.ports)
        self.nodes = [
            Process(f"{self.name} node {number}", command, self.folder / f"node{number}.log")
            for number, command in enumerate(commands)
        ]
        for node in self.nodes:
            node.launch()
        self._await_all()

    def _await_all(self) -> None:
        for node in self.nodes:
            node.await_ready()

    def _chosen(self, node: int | None) -> list[Process]:
        return self.nodes if node is None else [self.nodes[node]]
