"""The resources of the API, one module each; every operation is one method."""
