"""Builds the safeguards of a node with real containers from its settings."""

import os
from collections.abc import Callable, Collection

from mooring.agent.docker.network import Isolate
from mooring.agent.host import preflight
from mooring.agent.host.daemon_guard import DaemonGuard
from mooring.agent.host.firewall import Firewall, Isolation, management_addresses
from mooring.agent.settings import AgentSettings
from mooring_client.schemas.states import Reason


def preflight_of(settings: AgentSettings, *, has_gpus: Callable[[], bool]) -> preflight.Preflight:
    """Return a function that finds why nothing may start on this machine; it is called for every report."""

    def unsafe_version(info: preflight.Info) -> Reason | None:
        if settings.allow_unsafe_versions:
            return None
        return preflight.versions_problem(info, settings.runtime)

    def problem(info: preflight.Info) -> Reason | None:
        return (
            preflight.socket_problem(info, os.environ)
            or unsafe_version(info)
            or preflight.toolkit_problem(
                preflight.read_toolkit(),
                has_gpus=has_gpus(),
                allow_unsafe_toolkit=settings.allow_unsafe_toolkit,
            )
        )

    return problem


def isolation_of(settings: AgentSettings) -> Isolate:
    """Return a function that blocks containers and the Docker daemon from forbidden addresses (R10, R25)."""
    firewall = Firewall(management_addresses(settings.management_addresses, settings.server_url))
    isolation = Isolation(firewall, required=settings.network_isolation == "required")
    guard = DaemonGuard(firewall)

    def isolate(bridges: Collection[str]) -> Reason | None:
        problem = isolation.problem(bridges)
        guard.ensure_rules(bridges)
        return problem

    return isolate
