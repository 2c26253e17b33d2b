"""For users and for writers of backends.

`GroupLab` tests a handler against crashes and rebalances (see docs/testing.md);
`pxrs.testing.conformance` holds the suites that a backend has to pass; `faults` are stores that
fail on purpose, `simulator` runs whole groups over them.
"""

from pxrs.testing.clock import VirtualClock
from pxrs.testing.kit import GroupLab
from pxrs.testing.lab_member import Crash, LabMember
from pxrs.testing.lab_records import Handled, Refused

__all__ = ["Crash", "GroupLab", "Handled", "LabMember", "Refused", "VirtualClock"]
