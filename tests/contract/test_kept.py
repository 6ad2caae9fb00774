"""The document in the repository is what the code makes, and lacks nothing that the last release had."""

import json
from difflib import unified_diff
from typing import Any

from tests.contract import document as documents
from tests.contract.compatibility import breaks

# Changes that were worth it, each seen only by who uses what is new.
ACCEPTED = (
    "/gpus/model may now be array",  # alternatives, shown as they were asked for
    "request/gpus/mig_profile had the pattern",  # whatever it held was refused: it was not supported
    "/usage/gpus may now be number",  # shares of GPUs are parts of one; whole ones are written as before
    "/usage/gpus_by_model/* may now be number",
    "/is_admin may now be null",  # only admins see who else is one
)


def test_the_document_that_is_kept_is_the_one_that_is_served(document: dict[str, Any]) -> None:
    kept, served = documents.KEPT.read_text(), documents.as_text(document)
    changes = list(unified_diff(kept.splitlines(), served.splitlines(), "docs/openapi.json", "served", n=2))
    assert kept == served, "\n".join(
        ["the API has changed; if on purpose: make openapi, and commit docs/openapi.json", *changes[:60]]
    )


def test_nothing_breaks_for_clients_of_the_last_release(document: dict[str, Any]) -> None:
    released = json.loads(documents.RELEASED.read_text())
    found = [
        each for each in breaks(released, document) if not any(accepted in each for accepted in ACCEPTED)
    ]
    assert not found, "\n".join(
        [
            "clients of the last release (docs/openapi-released.json) break; keep what was there, and add:",
            *found,
        ]
    )
