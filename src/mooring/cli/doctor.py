"""`mooring doctor`: checks whether this machine can be a node, and says how to fix what fails."""

from contextlib import closing
from typing import Final

import typer

from mooring.agent.disk.disk import disk_settings
from mooring.agent.docker.client import Engine
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.docker.toolbox_volumes import current_toolbox
from mooring.agent.gpus.reader import GpuReading, NvmlGpuReader
from mooring.agent.host import preflight
from mooring.agent.host.firewall import Firewall
from mooring.agent.host.preflight import Check
from mooring.agent.host.preflight_pulls import downloads
from mooring.agent.nvml.types import NodeFault, NvmlInventory
from mooring.agent.runtime import RuntimeUnavailable
from mooring.agent.settings import AgentSettings
from mooring.cli.common import read_settings

_GPU_TIMEOUT_S: Final = 15.0
_MARKS: Final = {True: ("ok  ", "green"), None: ("warn", "yellow"), False: ("FAIL", "red")}


def doctor() -> None:
    """Check whether this machine can be a node, and say how to fix what fails."""
    results = _checks(read_settings(AgentSettings))
    for check in results:
        _print(check)
    failed = sum(check.ok is False for check in results)
    warned = sum(check.ok is None for check in results)
    typer.echo(f"\n{len(results)} checks, {failed} failed, {warned} warnings")
    raise typer.Exit(1 if failed else 0)


def _checks(settings: AgentSettings) -> list[Check]:
    gpus = NvmlGpuReader()
    docker = DockerRuntime(address="127.0.0.1", disk=disk_settings(settings))
    try:
        gpus.wait_first(_GPU_TIMEOUT_S)
        results = preflight.checks(
            docker.info,
            docker.disk.report,
            preflight.read_toolkit(),
            _inventory(gpus.latest()),
            allow_unsafe_toolkit=settings.allow_unsafe_toolkit,
            allow_unsafe_versions=settings.allow_unsafe_versions,
            runtime=settings.runtime,
        )
        required = settings.network_isolation == "required"
        isolation = preflight.isolation(Firewall().check, required=required)
        return [*results, downloads(), isolation, _toolbox()]
    finally:
        docker.close()
        gpus.close()


def _toolbox() -> Check:
    try:
        with closing(Engine()) as engine:
            toolbox = current_toolbox(engine)
    except RuntimeUnavailable as error:
        return Check("toolbox", ok=None, detail=str(error))
    if toolbox is None:
        remedy = "run `mooring toolbox`, so that sftp, scp and rsync work in instances"
        return Check("toolbox", ok=None, detail="none", remedy=remedy)
    return Check.fine("toolbox", toolbox.volume)


def _inventory(reading: GpuReading) -> NvmlInventory | NodeFault | None:
    if reading.error is not None:
        return reading.error
    if not reading.inventory and not reading.unreadable:
        return None
    return NvmlInventory(
        driver_version=reading.driver_version,
        cuda_version=reading.cuda_version,
        gpus=list(reading.inventory or ()),
        unreadable=list(reading.unreadable),
    )


def _print(check: Check) -> None:
    mark, colour = _MARKS[check.ok]
    typer.echo(f"{typer.style(mark, fg=colour)}  {check.name:<26} {check.detail}")
    if check.remedy and check.ok is not True:
        typer.echo(f"      -> {check.remedy}")
