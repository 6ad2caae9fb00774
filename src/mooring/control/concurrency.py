"""`If-Match`: rejects the change of an object that is no longer at the version that the caller read."""

from typing import Final

from mooring_client.errors import PreconditionFailed

# `If-Match: *`: any version, but the object must exist.
ANY_VERSION: Final = -2


def require_current_version(noun: str, version: int, if_match: int | None) -> None:
    """Raises PreconditionFailed if `If-Match` is given and names another version than the current one."""
    if if_match not in {None, ANY_VERSION, version}:
        raise PreconditionFailed(
            f"the {noun} is at version {version}, not {if_match}; read it again", version=version
        )
