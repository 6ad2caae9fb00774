"""The shared service of the tests of the API."""

from tests.api.conftest import sandbox, shared, shared_service

__all__ = ["sandbox", "shared", "shared_service"]
