# Generated from aio/resources/__init__.py: change that file, and run `make client`.
"""The resources of the API, one module each; every operation is one method."""
