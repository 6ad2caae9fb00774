"""The OpenAPI document of this source tree, as text of the same form as the committed file.

`make openapi` (`python -m tests.contract.document`) regenerates the file.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.service import running, settings_for

DOCS = Path(__file__).parents[2] / "docs"
COMMITTED = DOCS / "openapi.json"
RELEASED = DOCS / "openapi-released.json"


def current() -> dict[str, Any]:
    """The document of a running service."""
    with tempfile.TemporaryDirectory() as folder:
        database = f"sqlite:///{Path(folder) / 'mooring.db'}"
        with running(settings_for(database, Path(folder))) as service, service.client as client:
            return dict(client.get("/openapi.json").raise_for_status().json())


def as_text(document: dict[str, Any]) -> str:
    """The document as JSON with sorted keys, for readable diffs."""
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    COMMITTED.write_text(as_text(current()))
