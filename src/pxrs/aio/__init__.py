"""The same verbs for asyncio: `pxrs.aio.connect` is `pxrs.connect`, awaited.

Topics, messages and errors are those of `pxrs`.
"""

from pxrs.aio.admin import Groups, Queues, Sources, Topics
from pxrs.aio.app import Pxrs, connect
from pxrs.aio.client import Client
from pxrs.aio.consumer import Arriving, Consumer, ConsumerOptions
from pxrs.aio.kv import KeyValues, KeyWatch, TransactionKeys
from pxrs.aio.producer import Producer, Sent, SentMany
from pxrs.aio.reader import Follow, Reader
from pxrs.aio.running import Running
from pxrs.aio.threads import Opening
from pxrs.aio.transactions import Transaction, UnitOfWork

__all__ = [
    # opening
    "connect",
    "Opening",
    "Pxrs",
    "Topics",
    # sending and reading
    "Producer",
    "Sent",
    "SentMany",
    "Reader",
    "Follow",
    # groups
    "Consumer",
    "ConsumerOptions",
    "Arriving",
    "Transaction",
    "Groups",
    # work queues
    "UnitOfWork",
    "Running",
    "Queues",
    # keys and values
    "KeyValues",
    "KeyWatch",
    "TransactionKeys",
    # existing streams as topics
    "Sources",
    # nodes, for pxrs://
    "Client",
]
