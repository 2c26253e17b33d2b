"""The `pxrs` command."""
