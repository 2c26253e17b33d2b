-- What is taken is written again: to the same page, if there is room for it.
ALTER TABLE @.pxrs_queue_items SET (fillfactor = 50);
ALTER INDEX @.pxrs_queue_items_pkey SET (fillfactor = 50);
