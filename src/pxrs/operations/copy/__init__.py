"""Copies everything of one store into another: topics with their offsets, groups, queues.

Each step reads what both stores hold and does what is missing; nothing depends on what was done
before. So a copy that was killed is simply run again, and one that was made while the source was
in use is brought up to date by the next run. The target belongs to the copy until both were found
equal in every byte: a record there says so, and topics appear in it last of all.

Two copies at once do no harm: records are put on condition, items go under their own numbers, and
the log itself refuses a batch that is not the next one (see `messages`).
"""

from pxrs.operations.copy.copier import CopyReport, Count, Phase, copy_store, logs_of_copy
from pxrs.operations.copy.messages import PartitionSum

__all__ = ["CopyReport", "Count", "PartitionSum", "Phase", "copy_store", "logs_of_copy"]
