"""The `pxrs` command.

Arguments and lines of standard input come in; calls of `pxrs.connect` go out, and their results as
text or JSON. No other room imports it: it is the entry point of the package.
"""
