"""Commands on instances: ps, logs, stop, start, restart, rm, wait, explain."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooring_client.cli.completion import InstanceArgument, InstancesArgument
from mooring_client.cli.exits import Exit
from mooring_client.cli.output import Column, Format, FormatOption, age, gpus_of, show_list, show_one
from mooring_client.cli.resources import every, find_node, for_each
from mooring_client.cli.session import ENDED, connect, find_instance, project_id
from mooring_client.errors import NotFound
from mooring_client.terminal_text import clean_line

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring


def _detail(instance: Any) -> str:
    """What a user wants to know next: why it waits, where it runs, or how it ended."""
    if instance["state"] == "pending" and instance["queue_position"]:
        position = f"#{instance['queue_position']} in the queue"
        return f"{position}: {instance['reason']['message']}" if instance["reason"] else position
    if instance["reason"]:
        return str(instance["reason"]["message"])
    if instance["exit_code"] is not None:
        return f"exit code {instance['exit_code']}"
    return ", ".join(f"{each['host']}:{each['port']}->{each['container']}" for each in instance["endpoints"])


COLUMNS = (
    Column("NAME", lambda row: row["name"]),
    Column("ID", lambda row: row["id"], wide=True),
    Column("STATE", lambda row: row["state"]),
    Column("GPUS", gpus_of),
    Column("NODE", lambda row: row["node_name"] or "-"),
    Column("AGE", lambda row: age(row["created_at"])),
    Column("IMAGE", lambda row: row["image"], wide=True),
    Column("ATTEMPT", lambda row: str(row["attempt"]), wide=True),
    Column("DETAIL", _detail),
)


def ps(
    ended: Annotated[bool, typer.Option("--all", "-a", help="show ended instances too")] = False,
    label: Annotated[str | None, typer.Option("--label", "-l", help="key:value")] = None,
    node: Annotated[str | None, typer.Option(help="only those on this node")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="print each change, until Ctrl-C")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print IDs only")] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """List instances that have not ended.

    The JSON is a list of the objects of GET /v1/instances.
    """
    with connect() as client:
        newest = client.request("GET", "/v1/events", params={"newest": True})["last_seq"] if watch else 0
        found = _listed(client, ended=ended, label=label, node=node)
        if quiet:
            print("".join(f"{each['id']}\n" for each in found), end="")
            return
        show_list(found, COLUMNS, output, empty="no instances; `mooring run IMAGE` starts one")
        if watch:
            _watch(client, newest, output)


def _listed(client: "Mooring", *, ended: bool, label: str | None, node: str | None) -> Iterator[Any]:
    node_id = None if node is None else find_node(client, node)["id"]
    found = every(client, "/v1/instances", project_id=project_id(client), label=label, node_id=node_id)
    return (each for each in found if ended or each["state"] not in ENDED)


def _watch(client: "Mooring", after: int, output: Format) -> None:
    for event in client.events.follow(after):
        if event.type == "instance.state_changed":
            with suppress(NotFound):
                row = find_instance(client, event.data["instance_id"])
                show_list([row], COLUMNS, output, empty="")
                sys.stdout.flush()


def logs(
    instance: InstanceArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="until the container ends")] = False,
    tail: Annotated[int, typer.Option(min=0, help="number of last lines")] = 100,
    since: Annotated[
        str | None, typer.Option(help="only lines after this time: 2026-11-28T10:00:00Z")
    ] = None,
) -> None:
    """Show the output of an instance; lines of stderr go to stderr."""
    with connect() as client:
        found = find_instance(client, instance)
        if not follow:
            print(client.instances.logs(found["id"], tail=tail, since=since), end="")
            return
        for line in client.instances.logs(found["id"], tail=tail, since=since, follow=True):
            print(line.line, file=sys.stderr if line.stream == "stderr" else sys.stdout, flush=True)


def _each(references: list[str], act: Callable[["Mooring", str], str]) -> None:
    """Act on each instance by its ID, and print what was done."""
    with connect() as client:
        for_each(references, lambda reference: act(client, find_instance(client, reference)["id"]))


def stop(
    instances: InstancesArgument,
    timeout_s: Annotated[
        int | None, typer.Option("--timeout", "-t", help="seconds from SIGTERM to SIGKILL; default: 10")
    ] = None,
) -> None:
    """Stop instances. Their GPUs become free; their logs stay until they are deleted."""
    _each(instances, lambda client, found: client.instances.stop(found, timeout_s=timeout_s).name)


def start(instances: InstancesArgument) -> None:
    """Start ended instances again, as new ones in the queue."""
    _each(instances, lambda client, found: client.instances.start(found).name)


def restart(instances: InstancesArgument) -> None:
    """Restart instances with new containers on the same GPUs."""
    _each(instances, lambda client, found: client.instances.restart(found).name)


def rm(
    instances: InstancesArgument,
    wait_until_gone: Annotated[bool, typer.Option("--wait", help="until they are gone")] = False,
) -> None:
    """Stop instances and delete them, with their logs and files."""

    def delete(client: "Mooring", found: str) -> str:
        name = client.instances.delete(found).name
        if wait_until_gone:
            with suppress(NotFound):
                client.instances.wait(found, "deleted")
        return name

    _each(instances, delete)


def wait(
    instance: InstanceArgument,
    state: Annotated[
        str, typer.Option("--for", help="running, stopped, succeeded, failed, deleted; ended: any end")
    ] = "ended",
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="seconds; default: for ever")] = None,
) -> None:
    """Wait until an instance has a state. After its end, exit with its exit code."""
    with connect() as client:
        found = find_instance(client, instance)
        if state == "ended":
            raise typer.Exit(end_of(client, found["id"], timeout_s))
        if state == "deleted":
            with suppress(NotFound):
                client.instances.wait(found["id"], "deleted", timeout_s)
            return
        client.instances.wait(found["id"], state, timeout_s)  # type: ignore[arg-type]  # the server checks it


def end_of(client: "Mooring", instance_id: str, timeout_s: float | None = None) -> int:
    """Wait until an instance has ended, and return its exit code; without one, 0 or 1 by its state.

    Raises:
        WaitTimeout: it has not ended in time.
    """
    from mooring_client.failures import WaitTimeout

    try:
        ended = client.instances.wait(instance_id, "succeeded", timeout_s)
    except WaitTimeout:
        ended = client.instances.get(instance_id)
        if ended.state not in ENDED:
            raise
    if ended.exit_code is not None:
        return ended.exit_code
    return 0 if ended.state == "succeeded" else Exit.ERROR


def explain(instance: InstanceArgument, output: FormatOption = Format.TABLE) -> None:
    """Say why an instance waits, when it will start, and which changed request would start now."""
    from mooring_client.calls import path

    with connect() as client:
        found = find_instance(client, instance)
        answer = client.request("GET", path("/v1/instances/{}/explain", found["id"]))
    if output in {Format.TABLE, Format.WIDE}:
        print("\n".join(map(clean_line, explained(found["name"], answer))))
    else:
        show_one(answer, output, [])


def explained(name: str, answer: Any) -> Iterator[str]:
    """The explanation in sentences."""
    because = f": {answer['reason']['message']}" if answer["reason"] else ""
    yield f"{name} is {answer['state']}{because}"
    if answer["queue_position"]:
        yield f"position in the queue: {answer['queue_position']}"
    if answer["starts_at"]:
        yield f"predicted start: {answer['starts_at']}"
    for each in answer["waits_for"]:
        yield f"waits for {each['name']}, which ends at {each['ends_at'] or 'an unknown time'}"
    if answer["waits_for_others"]:
        yield f"waits for {answer['waits_for_others']} instances of other projects"
    for each in answer["refusals"]:
        yield f"  {each['node_name']}: {each['code']} (wanted {each['wanted']}, had {each['had']})"
    yield from _alternatives(answer["would_fit"])


def _alternatives(fits: Any) -> Iterator[str]:
    if not fits:
        return
    changes = []
    if fits["max_count_now"]:
        changes.append(f"{fits['max_count_now']} GPUs")
    if fits["models_now"]:
        changes.append(f"model {' or '.join(fits['models_now'])}")
    if fits["max_share_now"]:
        changes.append(f"a share of {fits['max_share_now']:g}")
    if fits["without_same_numa"]:
        changes.append("without same_numa")
    if fits["max_duration_s"]:
        changes.append(f"at most {fits['max_duration_s']} s")
    if changes:
        yield f"would start now with: {', or '.join(changes)}"
