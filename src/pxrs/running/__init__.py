"""Handlers that are run for the user: `px.run` over a group, `px.listen` over a queue.

A handler and its settings come in; attempts, dead letters and a clean stop go out, in threads or
in worker processes. Only `app` and `aio` import it.
"""
