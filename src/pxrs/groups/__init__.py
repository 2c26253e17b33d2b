"""Who owns which partition: joining, looking at the group's records, claiming, committing, leaving.

A member's wishes and the store's records come in; owned claims and committed checkpoints go out.
Consumers and operators (`px.groups`) import it; it knows no messages.
"""
