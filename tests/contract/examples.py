"""Resources that are created from the document's examples."""

from typing import Any

from tests.service import Client


def create_examples(admin: Client, document: dict[str, Any]) -> dict[str, list[str]]:
    """Create one resource in each collection; return the IDs by the path parameters that the links name."""
    known: dict[str, list[str]] = {}
    for path, item in document["paths"].items():
        links = item.get("post", {}).get("responses", {}).get("201", {}).get("links", {})
        if links and "{" not in path:
            schema = item["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            example = document["components"]["schemas"][schema.rsplit("/", 1)[-1]]["examples"][0]
            answer = admin.post(path, json=example)
            assert answer.status_code == 201, answer.text
            for link in links.values():
                for parameter, value in link["parameters"].items():
                    known[parameter] = [answer.json()[value.rsplit("/", 1)[-1]]]
    return known
