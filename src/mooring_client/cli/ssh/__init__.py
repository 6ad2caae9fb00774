"""`mooring ssh` and what OpenSSH needs for it."""
