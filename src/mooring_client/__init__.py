"""The client of Mooring: a Python SDK, the `mooring` command, and the models that client and server share."""

__version__ = "0.1.0"
