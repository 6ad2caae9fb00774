"""`If-Match`: rejects the change of an object that is no longer at the version that the caller read."""

from mooring_client.errors import PreconditionFailed


def require_current_version(noun: str, version: int, if_match: int | None) -> None:
    """Raises PreconditionFailed if `If-Match` is given and names another version than the current one."""
    if if_match is not None and version != if_match:
        raise PreconditionFailed(
            f"the {noun} is at version {version}, not {if_match}; read it again", version=version
        )
