"""Groups whose members are remote clients: who is held here, what each is told, what it commits.

`service.py` is what the wires ask, `host.py` has one group's members on this node, `held_member.py`
when one of them gives up a partition, and `fences.py` the fences that clients commit with.
"""
