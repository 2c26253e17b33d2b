"""Multis whose outcome is known, whatever the network does.

Every multi also writes a *slot*, an ephemeral znode that only this handle writes, and is
conditional on the slot's version. So the outcome of a multi that was not answered can be found
out: either the slot holds its mark, then it happened; or the slot can be written once more, then
it did not happen and never will, because it expects the slot as it was. The result of the slot's
write also contains the transaction's id, which is the version of everything in it.

Slots vanish with the connection's session, and so with the data of servers that come back empty.
On such servers transaction ids begin anew, and an old version would pass for a new one; so whenever
a slot is made, this handle checks that this is the store that it opened, by a name that the store
was given once.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pxrs.errors import Closed, ConfigError, OutcomeUnknown, PxrsError
from pxrs.stores.zookeeper.failures import DOUBTFUL, came_back_empty, zk
from pxrs.stores.zookeeper.link import Link, time_to_carry

_VOID = b"void"
# How long it may take at most to find out what became of a multi that has used up all its time.
_GRACE = 2.0


class Operation(NamedTuple):
    """One step of a multi: `create`, `set_data`, `delete` or `check`, and its arguments."""

    kind: str
    path: str
    value: bytes = b""
    version: int = -1

    def add_to(self, multi: Any) -> None:
        if self.kind == "create":
            multi.create(self.path, self.value)
        elif self.kind == "set_data":
            multi.set_data(self.path, self.value, self.version)
        elif self.kind == "delete":
            multi.delete(self.path, self.version)
        else:
            multi.check(self.path, self.version)


class Done(NamedTuple):
    """All of it happened, as transaction `zxid`. `results` is empty if the answer was lost."""

    zxid: int
    results: Sequence[Any] = ()


class Refused(NamedTuple):
    """Nothing happened: this operation did not fit, for this reason."""

    operation: Operation
    error: Exception


@dataclass
class _Slot:
    path: str
    version: int = 0


class Commits:
    """Sends multis for one handle, each with a slot of its own while it runs."""

    def __init__(self, link: Link, folder: str, name: str) -> None:
        self._link = link
        self._folder = folder
        self._name_path = name
        self._name = b""
        self._lock = threading.Lock()
        self._free: list[_Slot] = []

    def open(self) -> None:
        """Make the folder, and note which store this is; the first handle to open it names it."""
        self._link.make_all(self._folder)
        self._link.make(self._name_path, value=secrets.token_hex(8).encode())
        self._name = self._read_name(self._link.deadline())

    def run(
        self, operations: Sequence[Operation], deadline: float, carries: int = 0
    ) -> Done | Refused:
        """Do all of the operations, or none. `carries`: their size in bytes, about.

        Raises `OutcomeUnknown` if there was no answer and the outcome can't be found out,
        `StoreUnavailable` if the multi was not sent.
        """
        while True:
            slot = self._take(deadline)
            outcome = self._try(slot, operations, deadline, carries)
            if outcome is not None:
                # Not reused after an error: what was sent may still find the slot as it expects.
                with self._lock:
                    self._free.append(slot)
                return outcome

    def _take(self, deadline: float) -> _Slot:
        with self._lock:
            if self._free:
                return self._free.pop()
        path = f"{self._folder}/{secrets.token_hex(8)}"
        self._link.make(path, deadline, ephemeral=True)
        if self._read_name(deadline) != self._name:
            raise came_back_empty()
        return _Slot(path)

    def _read_name(self, deadline: float) -> bytes:
        name, _ = self._link.call(lambda client: client.get_async(self._name_path), deadline)
        return bytes(name)

    def _try(
        self, slot: _Slot, operations: Sequence[Operation], deadline: float, carries: int
    ) -> Done | Refused | None:
        """Send the multi; None if the slot was gone: nothing happened, another one is needed."""
        mark = secrets.token_hex(12).encode()
        all_of_it = [Operation("set_data", slot.path, mark, slot.version), *operations]

        sent = False

        def send(client: Any) -> Any:
            nonlocal sent
            multi = client.transaction()
            for operation in all_of_it:
                operation.add_to(multi)
            sent = True
            return multi.commit_async()

        try:
            results = self._link.once(send, deadline, carries=carries)
        except DOUBTFUL as error:
            # The time may be up, because it has carried much.
            grace = self._link.deadline(min(_GRACE, time_to_carry(carries)))
            return self._settle(slot, mark, error, max(deadline, grace))
        except (Closed, ConfigError) as error:
            # The connection was closed, by this process or by the server.
            if not sent:
                raise
            raise _unknown(error) from error
        for operation, result in zip(all_of_it, results, strict=True):
            if isinstance(result, zk.RolledBackError | zk.RuntimeInconsistency):
                continue
            if isinstance(result, Exception):
                return None if operation is all_of_it[0] else Refused(operation, result)
        slot.version += 1
        return Done(results[0].mzxid, results[1:])

    def _settle(
        self, slot: _Slot, mark: bytes, error: Exception, deadline: float
    ) -> Done | Refused | None:
        """Find out whether it happened, and make sure that it does not happen later."""
        while True:
            try:
                settled = self._look(slot, mark, error, deadline)
            except DOUBTFUL:
                continue
            except PxrsError:
                # The slot vanished with our session: its evidence is gone.
                raise _unknown(error) from error
            if settled is not None:
                return settled

    def _look(
        self, slot: _Slot, mark: bytes, error: Exception, deadline: float
    ) -> Done | Refused | None:
        """Look once; None if the multi arrived between the two requests: then look again."""
        value, stat = self._link.call(lambda client: client.get_async(slot.path), deadline)
        if value == mark:
            slot.version = stat.version
            return Done(stat.mzxid)
        if stat.version == slot.version:
            try:
                stat = self._link.once(
                    lambda client: client.set_async(slot.path, _VOID, slot.version),
                    deadline,
                    (zk.BadVersionError,),
                )
            except zk.BadVersionError:
                return None
        # Otherwise the new version comes from our own write, which was not answered.
        slot.version = stat.version
        return Refused(Operation("set_data", slot.path), error)


def _unknown(error: Exception) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"a commit was sent to ZooKeeper and not answered ({type(error).__name__}); "
        "it may have happened"
    )
