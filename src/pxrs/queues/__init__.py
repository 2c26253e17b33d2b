"""Work queues: the unit of work, the items it holds, their session, and `px.queues`.

Takes, puts, sends and SQL come in; one commit of a store goes out, or nothing. Consumers'
transactions and listeners are built on it.
"""
