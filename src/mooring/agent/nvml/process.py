"""The process that uses NVML: `python -m mooring.agent.nvml.process`, JSON lines in and out.

    {"op": "inventory"} | {"op": "sample"}   ->   {"error": null, "answer": {…}}
                                                  {"error": {"code": …, "message": …}, "answer": null}

Ends when its stdin closes, so with its parent. It is separate from the agent because a call may hang in the
driver forever, and because only a new process loads the library of an upgraded driver.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from mooring.agent.nvml.calls import NodeFaultError
from mooring.agent.nvml.session import Nvml

OPERATIONS: dict[str, Callable[[Nvml], dict[str, Any]]] = {"inventory": Nvml.inventory, "sample": Nvml.sample}


def main() -> None:
    """Answer until stdin closes. `_exit` waits for no thread, as one may hang in the driver."""
    answers = _private_stdout()
    session: Nvml | None = None
    for request in sys.stdin.buffer:
        try:
            session = session or Nvml()
            answer = {"error": None, "answer": OPERATIONS[json.loads(request)["op"]](session)}
        except NodeFaultError as fault:
            answer = {"error": {"code": fault.code, "message": str(fault)}, "answer": None}
        os.write(answers, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _private_stdout() -> int:
    """The pipe to the parent; libraries that print to file descriptor 1 write to stderr instead."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
