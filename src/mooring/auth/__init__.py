"""Credentials and rate limits, as the processes that serve users check them: a replica, or a gateway."""
