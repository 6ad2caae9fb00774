"""The `mooring` command."""
