"""`pxrs demo`: the promises that hold today, shown with real processes on a real store."""
