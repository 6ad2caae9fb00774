"""`mooring up` and `mooring server`: run the control plane, with or without this machine as a node."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import typer

from mooring.agent.settings import AgentSettings
from mooring.agent.sync.identity import identities
from mooring.cli.children import ChildProcess
from mooring.control.audit.signing_keys import WrongAuditKey
from mooring.control.nodes import joins, nodes
from mooring.control.tenants.encryption import WrongEncryptionKey
from mooring.core.access import on_host
from mooring.loops.garbage import limit_collections
from mooring.server import ControlPlane, Service, open_control_plane
from mooring.settings import Settings, is_loopback

_TOKEN_TTL_S = 3600
_NODE_STOPPED_WITHIN_S = 5
_GATEWAY_STOPPED_WITHIN_S = 5
# Its sessions end with the control plane, so it need not wait for them. The local node gets its URL in each
# request, so any free port will do.
_GATEWAY_SETTINGS = {"MOORING_GATEWAY_DRAIN_S": "0", "MOORING_GATEWAY_PORT": "0"}
# Variables that Python, the Docker client, NVIDIA's libraries and TLS read, besides the agent's settings.
_INHERITED = frozenset({"PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "NO_COLOR", "TERM"})
_INHERITED_PREFIXES = (
    "DOCKER_", "LC_", "LD_", "PYTHON", "SSL_CERT_", "NVIDIA_", "CUDA_", "XDG_", "HTTP_PROXY", "HTTPS_PROXY",
    "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
)  # fmt: skip


def serve_alone(settings: Settings) -> None:
    """Run the control plane in this process until it is stopped.

    Raises:
        DatabaseProblem, DBAPIError, OSError: the database cannot be used, or not any more.
    """
    plane = _open_or_exit(settings)

    def started(url: str) -> None:
        limit_collections()
        _print_banner(plane, url)
        typer.echo("  Add a node   mooring nodes join, or POST /v1/join-tokens (see docs/operating.md)")

    Service(plane, on_started=started).run()


def run(settings: Settings, agent_settings: AgentSettings) -> int:
    """Run the control plane in this process, and the local node and a gateway in child processes.

    Returns:
        The exit status: that of a child process if it failed, else 0.

    Raises:
        DatabaseProblem, DBAPIError, OSError: as `serve_alone`.
    """
    plane = _open_or_exit(settings)
    local = LocalNode(plane, agent_settings)
    gateway = ChildProcess("gateway", "gateway", "--local")

    def started(url: str) -> None:
        limit_collections()
        _print_banner(plane, url)
        _print_isolation(settings)
        _print_first_steps(plane, url)
        local.start(url)
        if settings.ssh_port or settings.proxy_port or settings.docker_port:
            gateway.start({**_GATEWAY_SETTINGS, "MOORING_API_URL": url} | os.environ)

    try:
        Service(plane, awaited_nodes=local.node_count, on_started=started).run()
    finally:
        gateway.stop(_GATEWAY_STOPPED_WITHIN_S)
        local.process.stop(_NODE_STOPPED_WITHIN_S)
    return local.process.exit_status or gateway.exit_status


def _open_or_exit(settings: Settings) -> ControlPlane:
    """Open the control plane, or exit with status 2 and say how to fix the settings."""
    try:
        plane = open_control_plane(settings)
    except WrongEncryptionKey as error:
        typer.echo(f"MOORING_ENCRYPTION_KEYS: {error}", err=True)
        raise typer.Exit(2) from None
    except WrongAuditKey as error:
        typer.echo(f"MOORING_AUDIT_KEYS: {error}", err=True)
        raise typer.Exit(2) from None
    # Printed now: it would be lost if the start failed later, for example because the port is in use.
    if plane.new_admin_key is not None:
        typer.echo(f"  Admin key    {plane.new_admin_key}   (shown only once; store it)")
    return plane


def agent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of this process's environment that the agent needs.

    It excludes the server's secrets (admin key, encryption keys, database URL): the agent runs tenants' work.
    """
    settings = {f"MOORING_{name.upper()}" for name in AgentSettings.model_fields}
    return {
        name: value
        for name, value in environment.items()
        if name in _INHERITED or name in settings or name.startswith(_INHERITED_PREFIXES)
    }


def relaxed_settings(settings: Settings) -> dict[str, str]:
    """Return agent settings for trying Mooring without root or with a distribution's old Docker.

    Empty unless only this machine can reach the API; behind a proxy, others can reach it.
    """
    if settings.behind_tls_proxy or not is_loopback(settings.host):
        return {}
    return {"MOORING_NETWORK_ISOLATION": "best_effort", "MOORING_ALLOW_UNSAFE_VERSIONS": "true"}


class LocalNode:
    """The agent as a child process. Its containers keep running when it ends; the next start finds them."""

    def __init__(self, plane: ControlPlane, settings: AgentSettings) -> None:
        self._plane = plane
        self._settings = settings
        self.node_count = sum(fleet.nodes for fleet in settings.simulate) or 1
        self.process = ChildProcess("local node", "agent", "--local")

    def start(self, url: str) -> None:
        self._approve_next_report()
        environment = agent_environment(os.environ) | {
            "MOORING_SERVER_URL": url,
            "MOORING_JOIN_TOKEN": ",".join(self._tokens()),
        }
        for name, value in relaxed_settings(self._plane.settings).items():
            environment.setdefault(name, value)
        self.process.start(environment)

    def _approve_next_report(self) -> None:
        """Approve what the local nodes report next: the operator may have changed MOORING_SIMULATE.

        This writes to the database directly: a node's credential does not allow it.
        """
        control_plane_id = self._plane.identity.control_plane_id
        joined = identities(self._settings.state_dir)
        with self._plane.database.write() as session:
            own = [each.node_id for each in joined if each.control_plane_id == control_plane_id]
            nodes.approve_next_report(session, on_host("node.approve"), own)

    def _tokens(self) -> list[str]:
        with self._plane.database.write() as session:
            access = on_host("join_token.create")
            return [
                joins.create_join_token(session, access, _TOKEN_TTL_S, None, local=True)[1]
                for _ in range(self.node_count)
            ]


def _print_banner(plane: ControlPlane, url: str) -> None:
    typer.echo(f"\nMooring is up.\n\n  API          {url}/v1\n  Docs         {url}/docs")
    typer.echo(f"  Data         {Path(plane.settings.data_dir).resolve()}")


def _print_isolation(settings: Settings) -> None:
    default = relaxed_settings(settings).get("MOORING_NETWORK_ISOLATION", "required")
    if os.environ.get("MOORING_NETWORK_ISOLATION", default) == "best_effort":
        text = "best effort, for local use only; for other users set MOORING_NETWORK_ISOLATION=required"
    else:
        text = "required: a node that cannot isolate containers from itself starts none (see mooring doctor)"
    typer.echo(f"  Isolation    {text}")


def _print_first_steps(plane: ControlPlane, url: str) -> None:
    key = plane.new_admin_key or "$MOORING_KEY"
    command = "mooring" if shutil.which("mooring") else f"{sys.prefix}/bin/mooring"
    body = '{"image": "busybox:1.36", "command": ["sleep", "3600"], "gpus": {"count": 1}}'
    typer.echo(
        "\nTry it"
        + (":" if plane.new_admin_key else ", with the admin key from the first start in MOORING_KEY:")
        + f"\n\n  {command} login {url}   # asks for the key"
        f"\n  {command} run --detach --gpus 1 busybox:1.36 -- sleep 3600\n"
        f'\n  curl -s {url}/v1/instances -H "Authorization: Bearer {key}" \\\n'
        f"    -H 'Content-Type: application/json' -d '{body}'\n"
    )
