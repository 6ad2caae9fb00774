"""Makes the synchronous client `mooring_client.sync` from the asynchronous one, `mooring_client.aio`.

`make client` runs it. tests/client/test_sync.py fails if the result is not the committed one.
"""

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "src" / "mooring_client"
SOURCE, TARGET = CLIENT / "aio", CLIENT / "sync"
# Written by hand in both packages.
BY_HAND = {"sleeping.py", "connecting.py", "forwarding.py", "__init__.py"}
NOTICE = "# Generated from {name}: change that file, and run `make client`.\n"
REPLACED = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\bAwaitable, ", ""),
    (r"\bAwaitable\[(\w+)\]", r"\1"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"__a(iter|enter|exit)__", r"__\1__"),
    (r"\baclose\b", "close"),
    (r"\baread\b", "read"),
    (r"\baiter_sse\b", "iter_sse"),
    (r"\bwebsockets\.asyncio\b", "websockets.sync"),
    (r"\bmooring_client\.aio\b", "mooring_client.sync"),
    (r"\bAsync([A-Z])", r"\1"),
    (r"[Tt]he asynchronous client", "The client"),
)


def generated() -> dict[Path, str]:
    """The files of the synchronous client, by their path below its package, formatted."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE)
        if path.name not in BY_HAND or len(name.parts) > 1:
            text = path.read_text()
            for pattern, replacement in REPLACED:
                text = re.sub(pattern, replacement, text)
            found[name] = _formatted(NOTICE.format(name=f"aio/{name.as_posix()}") + text)
    return found


def _formatted(text: str) -> str:
    for command in (["check", "--fix", "--select=I", "--quiet"], ["format", "--quiet"]):
        text = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename=src/mooring_client/sync/x.py", "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return text


def main() -> None:
    for name, text in generated().items():
        target = TARGET / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


if __name__ == "__main__":
    main()
