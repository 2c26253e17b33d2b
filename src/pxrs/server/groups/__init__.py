"""Groups whose members are remote clients: who is held here, what each is sent, what it commits.

HTTP and `pxrs://` call `service.py`. `host.py` has one group's members on this node,
`held_member.py` decides when one of them gives up a partition, and `fences.py` has the fences that
clients commit with.
"""
