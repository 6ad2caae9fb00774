"""`mooring up` and `mooring server`: serving, with or without this machine as a node, and what they print."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import typer

from mooring.agent.settings import AgentSettings
from mooring.agent.sync.identity import identities
from mooring.control.audit.signing_keys import WrongAuditKey
from mooring.control.nodes import nodes
from mooring.control.tenants.encryption import WrongEncryptionKey
from mooring.core.access import on_host
from mooring.server import ControlPlane, Service, open_control_plane
from mooring.settings import Settings, is_loopback

_TOKEN_TTL_S = 3600
# What Python, Docker's client, NVIDIA's libraries and TLS read, beside the agent's own settings.
_PASSED_ON = frozenset({"PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "NO_COLOR", "TERM"})
_PASSED_ON_PREFIXES = (
    "DOCKER_", "LC_", "LD_", "PYTHON", "SSL_CERT_", "NVIDIA_", "CUDA_", "XDG_", "HTTP_PROXY", "HTTPS_PROXY",
    "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
)  # fmt: skip


def serve_alone(settings: Settings) -> None:
    """The control plane in this process, until it is told to end."""
    plane = _opened(settings)

    def started(url: str) -> None:
        _keep_out_of_collections()
        _print_banner(plane, url)
        typer.echo("  Add a node   see docs/operating.md: POST /v1/join-tokens, then mooring agent")

    Service(plane, on_started=started).run()


def run(settings: Settings, agent_settings: AgentSettings) -> int:
    """The control plane in this process and the local node in a child of it.

    Returns:
        The exit status: the node's own if it gave up, else 0.
    """
    plane = _opened(settings)
    local = LocalNode(plane, agent_settings)

    def started(url: str) -> None:
        _keep_out_of_collections()
        _print_banner(plane, url)
        _print_isolation(settings)
        _print_first_steps(plane, url)
        local.start(url)

    try:
        Service(plane, awaited_nodes=local.node_count, on_started=started).run()
    finally:
        local.stop()
    return local.exit_status


def _keep_out_of_collections() -> None:
    """Keep Python's garbage collector from what was made so far, which stays until the process ends.

    A full collection of all modules and the models of the API takes 0.2 s, in which nobody is answered, and
    with Python's thresholds a busy server has one every few seconds. What requests leave behind is found by
    the collections of young objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)


def _opened(settings: Settings) -> ControlPlane:
    """The control plane, or an exit with status 2 that says how to mend its settings."""
    try:
        plane = open_control_plane(settings)
    except WrongEncryptionKey as error:
        typer.echo(f"MOORING_ENCRYPTION_KEYS: {error}", err=True)
        raise typer.Exit(2) from None
    except WrongAuditKey as error:
        typer.echo(f"MOORING_AUDIT_KEYS: {error}", err=True)
        raise typer.Exit(2) from None
    # At once: nobody could read it again if the start failed at a port that is taken.
    if plane.new_admin_key is not None:
        typer.echo(f"  Admin key    {plane.new_admin_key}   (shown this once; keep it)")
    return plane


def agent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What the agent needs of this process's environment.

    The server's secrets (admin key, encryption keys, database URL) stay here: the agent runs tenants' work.
    """
    settings = {f"MOORING_{name.upper()}" for name in AgentSettings.model_fields}
    return {
        name: value
        for name, value in environment.items()
        if name in _PASSED_ON or name in settings or name.startswith(_PASSED_ON_PREFIXES)
    }


def relaxed_settings(settings: Settings) -> dict[str, str]:
    """Agent settings with which Mooring can be tried without root, and with a distribution's old Docker.

    They apply only while the API is reachable from this machine alone: a proxy in front opens it to others.
    """
    if settings.behind_tls_proxy or not is_loopback(settings.host):
        return {}
    return {"MOORING_NETWORK_ISOLATION": "best_effort", "MOORING_ALLOW_UNSAFE_VERSIONS": "true"}


class LocalNode:
    """The agent as a child process. Each of the two ends when the other does."""

    def __init__(self, plane: ControlPlane, settings: AgentSettings) -> None:
        self._plane = plane
        self._settings = settings
        self.node_count = sum(fleet.nodes for fleet in settings.simulate) or 1
        self.exit_status = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def start(self, url: str) -> None:
        self._approve_anew()
        environment = agent_environment(os.environ) | {
            "MOORING_SERVER_URL": url,
            "MOORING_JOIN_TOKEN": ",".join(self._tokens()),
        }
        for name, value in relaxed_settings(self._plane.settings).items():
            environment.setdefault(name, value)
        # Its standard input is a pipe from here: when this process ends, however it does, the agent
        # reads the end of it and goes too.
        self._child = subprocess.Popen(
            [sys.executable, "-m", "mooring.cli", "agent", "--local"],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, which ends the agent in its turn
        )
        threading.Thread(target=self._watch, args=(self._child,), name="local-node", daemon=True).start()

    def _approve_anew(self) -> None:
        """Approve what the local nodes report next: the operator may have changed MOORING_SIMULATE.

        Done in the database, so that no credential of a node can ask for it.
        """
        ours = self._plane.identity.control_plane_id
        joined = identities(self._settings.state_dir)
        with self._plane.database.write() as session:
            own = [each.node_id for each in joined if each.control_plane_id == ours]
            nodes.approve_next_report(session, on_host("node.approve"), own)

    def _tokens(self) -> list[str]:
        with self._plane.database.write() as session:
            access = on_host("join_token.create")
            made = [
                nodes.create_join_token(session, access, _TOKEN_TTL_S, None) for _ in range(self.node_count)
            ]
            return [secret for _token, secret in made]

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        status = child.wait()
        if not self._stopping and status != 0:
            typer.echo(f"the local node ended with status {status}; ending", err=True)
            self.exit_status = status
            os.kill(os.getpid(), signal.SIGTERM)

    def stop(self) -> None:
        """End the agent; its containers run on, and it finds them again at the next start."""
        self._stopping = True
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def _print_banner(plane: ControlPlane, url: str) -> None:
    typer.echo(f"\nMooring is up.\n\n  API          {url}/v1\n  Docs         {url}/docs")
    typer.echo(f"  Data         {Path(plane.settings.data_dir).resolve()}")


def _print_isolation(settings: Settings) -> None:
    relaxed = relaxed_settings(settings).get("MOORING_NETWORK_ISOLATION", "required")
    if os.environ.get("MOORING_NETWORK_ISOLATION", relaxed) == "best_effort":
        said = "best effort: for use from this machine only; MOORING_NETWORK_ISOLATION=required for others"
    else:
        said = "required: a node that cannot keep containers from itself starts none (see mooring doctor)"
    typer.echo(f"  Isolation    {said}")


def _print_first_steps(plane: ControlPlane, url: str) -> None:
    key = plane.new_admin_key or "$MOORING_KEY"
    body = '{"image": "busybox:1.36", "command": ["sleep", "3600"], "gpus": {"count": 1}}'
    typer.echo(
        "\nTry it"
        + (":" if plane.new_admin_key else ", with the admin key of the first start in MOORING_KEY:")
        + f'\n\n  curl -s {url}/v1/instances -H "Authorization: Bearer {key}" \\\n'
        f"    -H 'Content-Type: application/json' -d '{body}'\n"
    )
