"""Pauses between attempts."""

import time


def sleep(seconds: float) -> None:
    time.sleep(seconds)
