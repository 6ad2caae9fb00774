"""`mooring up`, `server`, `gateway` and `agent`: the processes of a service."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from mooring.cli.common import explained_problems, read_settings
from mooring.cli.thread_failures import end_process_on_thread_failure

if TYPE_CHECKING:
    from mooring.agent.settings import AgentSettings

# Each command imports what it runs: an agent must not load the control plane into memory.


def up() -> None:
    """Run the control plane with this machine as its node; both end together."""
    end_process_on_thread_failure()
    from mooring.agent.settings import AgentSettings  # noqa: PLC0415
    from mooring.cli.up import run  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    # Both are read before the start, so that no invalid setting stops it after the admin key is created.
    settings, agent_settings = read_settings(Settings), read_settings(AgentSettings)
    with explained_problems():
        raise typer.Exit(run(settings, agent_settings))


def server() -> None:
    """Run the control plane alone; nodes join with `mooring agent`."""
    end_process_on_thread_failure()
    from mooring.cli.up import serve_alone  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    settings = read_settings(Settings)
    with explained_problems():
        serve_alone(settings)


def gateway(
    local: Annotated[bool, typer.Option(hidden=True, help="started by `mooring up`; ends with it")] = False,
) -> None:
    """Run a gateway: SSH into instances. It needs the server's database and encryption keys."""
    end_process_on_thread_failure()
    from mooring.cli.gateway import run  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    run(read_settings(Settings), ends_with_parent=local)


def agent(
    local: Annotated[bool, typer.Option(hidden=True, help="started by `mooring up`; ends with it")] = False,
) -> None:
    """Run this machine as a node: MOORING_SERVER_URL=… MOORING_JOIN_TOKEN=… mooring agent."""
    end_process_on_thread_failure()
    from mooring.agent.main import run  # noqa: PLC0415
    from mooring.agent.settings import AgentSettings  # noqa: PLC0415

    settings = read_settings(AgentSettings)
    tokens = _tokens(settings)
    if local:
        raise typer.Exit(run(settings, lambda _name: next(tokens, None), simulate_missing=True, parent_fd=0))
    raise typer.Exit(run(settings, lambda _name: next(tokens, None)))


def _tokens(settings: "AgentSettings") -> Iterator[str]:
    """Yield the comma-separated join tokens: each is single-use, so simulated nodes need one each."""
    given = settings.join_token.get_secret_value() if settings.join_token else ""
    yield from filter(None, given.split(","))
