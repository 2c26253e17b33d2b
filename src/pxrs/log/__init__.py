"""Record batches and the logs that keep them."""
