"""The client of Mooring: a Python SDK, the `mooring` command, and the models that client and server share.

    from mooring_client import Mooring

    with Mooring() as client:
        for instance in client.instances.list():
            print(instance.name, instance.state)

`AsyncMooring` is the same for asyncio. `OPERATIONS` names the method of each operation of the API. Errors of
the server are in `mooring_client.errors`, those without an answer in `mooring_client.failures`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooring_client.aio.client import AsyncMooring
    from mooring_client.errors import MooringError
    from mooring_client.failures import ClientFailure
    from mooring_client.operations import OPERATIONS
    from mooring_client.sync.client import Mooring

__version__ = "0.1.0"
__all__ = ["OPERATIONS", "AsyncMooring", "ClientFailure", "Mooring", "MooringError"]

# Loaded at their first use: the server needs only the models, and a command its help.
_WHERE = {
    "AsyncMooring": "mooring_client.aio.client",
    "ClientFailure": "mooring_client.failures",
    "Mooring": "mooring_client.sync.client",
    "MooringError": "mooring_client.errors",
    "OPERATIONS": "mooring_client.operations",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
