"""The schema of log lines in event streams."""

from typing import Literal

from mooring_client.schemas.base import Answer


class LogLine(Answer):
    """A line of an instance's output."""

    stream: Literal["stdout", "stderr"]
    line: str
    at: str
