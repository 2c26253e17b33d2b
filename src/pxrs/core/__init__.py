"""Pure logic: no IO, no threads, no clock, no global random."""
