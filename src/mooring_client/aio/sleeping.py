"""Pauses between attempts; `sync/sleeping.py` is written by hand too."""

import asyncio


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)
