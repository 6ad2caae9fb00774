"""Tasks that copy in both directions, of which one ends first."""

import asyncio
from typing import Any


async def cancelled(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
