"""One member's work: fetch the partitions it owns, hand messages out, count them, commit.

Owned claims and stored batches come in; messages, callbacks and transactions go out. `running`
and `app` import it. The reader, which needs no group, is here too.
"""
