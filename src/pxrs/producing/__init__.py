"""From `send` to durable: a message is routed, checked, batched and appended.

Keys and values come in; handles go out, whose result is each message's position, or that it is not
in the log. Units of work (`queues`) use the same checks; nothing in here knows groups or consumers.
"""
