"""Everything of one store into another: topics with their offsets, groups, queues.

Nothing here depends on what was done before: each step reads what both stores hold, and does what
is missing. So a copy that was killed is simply run again, and one that was made while the source
was in use is brought up to date by the next run. The target belongs to the copy until it was found
equal in every byte; a record there says so, and topics show up in it last of all.

Two copies at once do no harm: records are put on condition, items go under their own numbers, and
the log itself refuses a batch that is not the next one (see `logs`).
"""

from pxrs.operations.copy.copier import copy_store
from pxrs.operations.copy.report import CopyReport, Count, PartitionSum, Phase

__all__ = ["CopyReport", "Count", "PartitionSum", "Phase", "copy_store"]
