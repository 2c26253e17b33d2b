"""The same verbs for asyncio: `pxrs.aio.connect` is `pxrs.connect`, awaited.

Topics, messages and errors are those of `pxrs`.
"""

from pxrs.aio.app import Connecting, Pxrs, connect
from pxrs.aio.consumer import Arriving, Consumer, ConsumerOptions, Joining
from pxrs.aio.groups import Groups
from pxrs.aio.listener import Listener
from pxrs.aio.producer import Producer
from pxrs.aio.queues import Queues
from pxrs.aio.reader import Follow, Reader
from pxrs.aio.sent import Sent, SentMany
from pxrs.aio.transaction import Transaction
from pxrs.aio.unit_of_work import UnitOfWork

__all__ = [
    # opening
    "connect",
    "Connecting",
    "Pxrs",
    # sending and reading
    "Producer",
    "Sent",
    "SentMany",
    "Reader",
    "Follow",
    # groups
    "Joining",
    "Consumer",
    "ConsumerOptions",
    "Arriving",
    "Transaction",
    "Groups",
    # work queues
    "UnitOfWork",
    "Listener",
    "Queues",
]
