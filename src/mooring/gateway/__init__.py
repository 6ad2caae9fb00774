"""`mooring gateway`: protocols that end in an instance. Agents connect to this process, as to a replica."""
