"""`If-Match`: rejects a change if the object is newer than the version that the caller read."""

from mooring.core.errors import PreconditionFailed


def require_current_version(noun: str, version: int, if_match: int | None) -> None:
    """Raises PreconditionFailed unless the caller has read the current version."""
    if if_match is not None and version != if_match:
        raise PreconditionFailed(
            f"the {noun} is at version {version}, not {if_match}; read it again", version=version
        )
