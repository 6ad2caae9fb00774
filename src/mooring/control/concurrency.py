"""`If-Match`: a change of what its caller has read, and of nothing newer."""

from mooring.core.errors import PreconditionFailed


def require_current_version(noun: str, version: int, if_match: int | None) -> None:
    """Raises PreconditionFailed when the caller read another version than the present one."""
    if if_match is not None and version != if_match:
        raise PreconditionFailed(
            f"the {noun} is at version {version}, not {if_match}; read it again", version=version
        )
