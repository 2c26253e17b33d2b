"""Test tools for users and for authors of backends.

`GroupLab` tests a handler against crashes and rebalances (see docs/testing.md);
`pxrs.testing.conformance` holds the suites that a backend has to pass; `faults` are stores that
fail on purpose.
"""

from pxrs.testing.clock import VirtualClock
from pxrs.testing.group_lab import Crash, GroupLab, Handled, LabMember, Refused

__all__ = ["Crash", "GroupLab", "Handled", "LabMember", "Refused", "VirtualClock"]
