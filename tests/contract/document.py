"""The OpenAPI document of this source tree, in the form in which the repository keeps it.

`make openapi` (`python -m tests.contract.document`) writes it anew.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.service import running, settings_for

DOCS = Path(__file__).parents[2] / "docs"
KEPT = DOCS / "openapi.json"
RELEASED = DOCS / "openapi-released.json"


def current() -> dict[str, Any]:
    """As a running service sends it."""
    with tempfile.TemporaryDirectory() as folder:
        database = f"sqlite:///{Path(folder) / 'mooring.db'}"
        with running(settings_for(database, Path(folder))) as service, service.client as client:
            return dict(client.get("/openapi.json").json())


def as_text(document: dict[str, Any]) -> str:
    """Sorted, so that a change shows as what it is and not as a change of order."""
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    KEPT.write_text(as_text(current()))
