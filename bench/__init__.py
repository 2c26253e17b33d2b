"""Benchmarks: pxrs, its limit and its peers in one run, as ratios."""
