"""Lists: filters, pages, cursors."""

import pytest
from cachetools import LRUCache

from tests.api.conftest import Sandbox
from tests.nodes import WireNode
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases


def test_filters_select_and_combine(sandbox: Sandbox) -> None:
    key = sandbox.node.name
    running = sandbox.running(name=f"{key}-run", labels={key: "x", "stage": "a:b"})
    queued = sandbox.create(name=f"{key}-wait", labels={key: "x", "stage": "c"}, gpus={"count": 60})
    sandbox.create(name=f"{key}-other", labels={key: "y"}, gpus={"count": 60})

    def names(**params: object) -> list[str]:
        return sorted(item["name"] for item in sandbox.client.items("/v1/instances", **params))

    assert names(label=f"{key}:x") == [f"{key}-run", f"{key}-wait"]
    assert names(label=[f"{key}:x", "stage:a:b"]) == [f"{key}-run"]
    assert names(label=[f"{key}:x", "stage:a"]) == []
    assert names(label=f"{key}:") == []
    assert names(label=f"{key}:x", state="running") == [f"{key}-run"]
    assert names(name=f"{key}-wait") == [queued["name"]]
    assert names(node_id=sandbox.node.id) == [f"{key}-run"]
    assert names(node_id=sandbox.node.id, state="pending") == []
    assert names(label=f"{key}:x", project_id=queued["project_id"]) == [f"{key}-run", f"{key}-wait"]
    assert names(project_id="prj_other") == []
    assert running.instance_id in {
        item["id"] for item in sandbox.client.items("/v1/instances", state="running")
    }


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/v1/instances", "stat=running"),
        ("/v1/instances", "state=runing"),
        ("/v1/instances", "label=team"),
        ("/v1/instances", "label=%22:x"),
        ("/v1/instances", "label=a%22]%27:x"),
        ("/v1/instances", "label=" + "&label=".join(["a:b"] * 17)),
        ("/v1/instances", "limit=0"),
        ("/v1/instances", "limit=201"),
        ("/v1/instances", "limit=1.5"),
        ("/v1/instances", "limit=NaN"),
        ("/v1/instances", f"limit={2**70}"),
        ("/v1/instances", "name=" + "a" * 64),
        ("/v1/nodes", "nam=x"),
        ("/v1/nodes", "limit=-1"),
        ("/v1/gpus", "health=fine"),
        ("/v1/gpus", "state=x"),
        ("/v1/events", "after=-1"),
        ("/v1/events", f"after={2**63}"),
        ("/v1/events", f"after={2**70}"),
        ("/v1/events", "wait_s=61"),
        ("/v1/events", "wait_s=NaN"),
        ("/v1/events", "wait_s=1e999"),
    ],
)
def test_an_invalid_query_is_rejected(shared: Client, path: str, query: str) -> None:
    problem(shared.get(f"{path}?{query}"), 422, "validation_failed")


def test_paging_returns_every_instance_once_during_changes(shared: Client) -> None:
    label = {"walk": "yes"}
    permanent = {shared.create(labels=label, gpus={"count": 64})["id"] for _ in range(120)}
    walked: list[str] = []
    cursor: str | None = None
    while True:
        params: dict[str, str | int] = {"label": "walk:yes", "limit": 17}
        answer = shared.get("/v1/instances", params=params | ({"cursor": cursor} if cursor else {})).json()
        walked += [item["id"] for item in answer["items"]]
        cursor = answer["next_cursor"]
        if cursor is None:
            break
        assert len(answer["items"]) == 17
        created = shared.create(labels=label, gpus={"count": 64})["id"]
        if len(walked) > 60:
            shared.delete(f"/v1/instances/{created}")
        permanent.discard(walked[-1])
        shared.delete(f"/v1/instances/{walked[-1]}")  # the instance that the cursor points at
    assert len(walked) == len(set(walked))
    assert permanent <= set(walked)
    assert walked == sorted(walked, reverse=True)


def test_the_cache_of_listed_instances_is_bounded(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = sandbox.service.service._server._context.rendered
    monkeypatch.setattr(rendered, "_texts", LRUCache(100_000, getsizeof=len))
    made = [sandbox.create(env={"V": "x" * 30_000}, gpus={"count": 9})["id"] for _ in range(4)]
    for round_ in range(3):
        for instance_id in made:
            sandbox.client.patch(f"/v1/instances/{instance_id}", json={"labels": {"n": str(round_)}})
        shown = sandbox.client.items("/v1/instances", label=f"n:{round_}")
        assert {item["id"] for item in shown} == set(made)
        assert {len(item["env"]["V"]) for item in shown} == {30_000}
    assert 0 < sum(map(len, rendered._texts.values())) <= 100_000


def test_a_cursor_is_valid_for_its_own_list_and_filters_only(sandbox: Sandbox) -> None:
    for _ in range(3):
        sandbox.create(labels={"cur": "1"})
    page = sandbox.client.get("/v1/instances", params={"limit": 1, "label": "cur:1"}).json()
    cursor = page["next_cursor"]
    good = {"label": "cur:1", "cursor": cursor}
    assert sandbox.client.get("/v1/instances", params=good).status_code == 200
    assert sandbox.client.get("/v1/instances", params=good | {"limit": 2}).status_code == 200
    for path, params in [
        ("/v1/instances", {"cursor": cursor}),
        ("/v1/instances", good | {"state": "pending"}),
        ("/v1/nodes", {"cursor": cursor}),
        ("/v1/gpus", {"cursor": cursor}),
        ("/v1/instances", good | {"cursor": cursor[:-2]}),
        ("/v1/instances", good | {"cursor": ("B" if cursor[0] == "A" else "A") + cursor[1:]}),
        ("/v1/instances", good | {"cursor": "x"}),
        ("/v1/instances", good | {"cursor": "ins_01hzzzzzzzzzzzzzzzzzzzzzzz"}),
        ("/v1/instances", good | {"cursor": "😀"}),
        ("/v1/instances", good | {"cursor": ""}),
    ]:
        problem(sandbox.client.get(path, params=params), 400, "bad_cursor")


def test_nodes_and_gpus_are_paged(client: Client) -> None:
    nodes = [WireNode(client, f"n-{number}", gpus=3) for number in range(3)]
    for node in nodes:
        node.sync()
    for path, total in (("/v1/nodes", 3), ("/v1/gpus", 9)):
        found, cursor = [], ""
        while True:
            page = client.get(path, params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
            found += [item.get("uuid") or item["id"] for item in page["items"]]
            if not (cursor := page["next_cursor"]):
                break
        assert len(found) == len(set(found)) == total
    assert [item["name"] for item in client.items("/v1/nodes", name="n-1")] == ["n-1"]
    assert len(client.items("/v1/gpus", node_id=nodes[0].id)) == 3
    assert client.items("/v1/gpus", health="lost") == []
    for node in nodes:
        node.close()


def test_pending_instances_show_their_queue_position(client: Client) -> None:
    made = [client.create(name=f"q-{number}", gpus={"count": 1})["id"] for number in range(3)]

    def positions() -> list[int | None]:
        return [client.instance(instance_id)["queue_position"] for instance_id in made]

    wait_until(lambda: positions() == [1, 2, 3])  # set in the next scheduling cycle
    client.delete(f"/v1/instances/{made[0]}")
    client.post(f"/v1/instances/{made[1]}/stop")
    wait_until(lambda: client.instance(made[2])["queue_position"] == 1)
    assert client.instance(made[1])["queue_position"] is None
    client.post(f"/v1/instances/{made[1]}/start")
    wait_until(lambda: client.instance(made[1])["queue_position"] == 2)
    assert client.instance(made[2])["queue_position"] == 1
    assert client.instance(made[1])["reason"]["code"] == "no_nodes"
