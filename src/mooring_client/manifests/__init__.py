"""Files that describe resources, for `mooring apply` and `mooring diff`."""
