"""`pxrs demo`: the promises of a consumer group, shown with real processes on a real store."""
