"""`mooring cp`: files to and from instances."""
