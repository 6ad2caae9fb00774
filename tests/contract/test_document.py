"""The committed document equals the served one and is compatible with the last release."""

import json
from difflib import unified_diff
from typing import Any

from tests.contract import document as documents
from tests.contract.compatibility import breaks

# Accepted breaking changes; each affects only clients that use the new feature, or agents not yet upgraded.
ACCEPTED_BREAKS = (
    "/gpus/model may now be array",  # alternatives, shown as requested
    "request/gpus/mig_profile had the pattern",  # every value was rejected: the field was not supported
    "/usage/gpus may now be number",  # shares are fractions of a GPU; whole GPUs are written as before
    "/usage/gpus_by_model/* may now be number",
    "/is_admin may now be null",  # only admins see whether others are admins
    # Streams became WebSockets (docs/decisions/0036). Older agents serve none until they are upgraded.
    "POST /agent/v1/streams/{stream_id}: the operation is gone",
)


def test_the_committed_document_is_the_served_one(document: dict[str, Any]) -> None:
    committed, served = documents.COMMITTED.read_text(), documents.as_text(document)
    changes = list(
        unified_diff(committed.splitlines(), served.splitlines(), "docs/openapi.json", "served", n=2)
    )
    assert committed == served, "\n".join(
        ["the API has changed; if on purpose, run `make openapi` and commit docs/openapi.json", *changes[:60]]
    )


def test_clients_of_the_last_release_keep_working(document: dict[str, Any]) -> None:
    released = json.loads(documents.RELEASED.read_text())
    found = [
        each
        for each in breaks(released, document)
        if not any(accepted in each for accepted in ACCEPTED_BREAKS)
    ]
    assert not found, "\n".join(
        [
            "clients of the last release (docs/openapi-released.json) break; keep what was there, and add:",
            *found,
        ]
    )
