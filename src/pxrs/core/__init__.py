"""Pure rules: routing, assignment, the group machine, claims, progress, retries, sequences.

Values come in, decisions come out: no IO, no threads, no clock, no global random. Every room may
import it; it imports `types` and `errors` only.
"""
