"""Docker's own API: the subset that `docker`, docker-py and compose use for instances."""
