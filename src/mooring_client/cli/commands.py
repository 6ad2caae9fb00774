"""The table of commands: where each is, and its line in `mooring --help`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Entry:
    """A command.

    Attributes:
        target: `module:attribute` of its function, or of the Typer application of its subcommands.
        help: one line.
        hidden: not in the help; other programs run it.
    """

    target: str
    help: str
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Commands under one title of the help.

    Attributes:
        prepare: `module:function` to call before any of these commands is imported.
    """

    title: str
    commands: Mapping[str, Entry]
    prepare: str | None = None


_CLI: Final = "mooring_client.cli"
COMMANDS: Final = (
    Section(
        "Instances",
        {
            "run": Entry(f"{_CLI}.run:run", "Start an instance, and show its output until it ends."),
            "ps": Entry(f"{_CLI}.instances:ps", "List instances."),
            "logs": Entry(f"{_CLI}.instances:logs", "Show the output of an instance."),
            "exec": Entry(f"{_CLI}.exec:exec_command", "Run a command in an instance."),
            "ssh": Entry(f"{_CLI}.ssh.commands:ssh", "Log in to an instance with SSH."),
            "cp": Entry(f"{_CLI}.copying.command:cp", "Copy files to and from an instance."),
            "forward": Entry(f"{_CLI}.ports:forward", "Forward a local port to an instance."),
            "open": Entry(f"{_CLI}.ports:open_port", "Open a port of an instance in the browser."),
            "stop": Entry(f"{_CLI}.instances:stop", "Stop instances; they keep their logs."),
            "start": Entry(f"{_CLI}.instances:start", "Start ended instances again."),
            "restart": Entry(f"{_CLI}.instances:restart", "Restart instances on the same GPUs."),
            "rm": Entry(f"{_CLI}.instances:rm", "Stop and delete instances."),
            "apply": Entry(f"{_CLI}.apply:apply", "Create or change the resources of YAML files."),
            "diff": Entry(f"{_CLI}.apply:diff", "Show what apply would change."),
            "wait": Entry(f"{_CLI}.instances:wait", "Wait until an instance has a state."),
            "explain": Entry(
                f"{_CLI}.instances:explain", "Say why an instance waits, and when it will start."
            ),
        },
    ),
    Section(
        "Cluster",
        {
            "slurm": Entry(f"{_CLI}.slurm.commands:app", "Slurm's commands: srun, sbatch, squeue, scancel."),
            "gpus": Entry(f"{_CLI}.cluster:gpus", "List what can be requested, and what is free now."),
            "queue": Entry(f"{_CLI}.cluster:queue", "List pending instances in scheduling order."),
            "top": Entry(f"{_CLI}.top:top", "Watch GPUs and instances."),
            "nodes": Entry(f"{_CLI}.nodes:app", "List and manage nodes."),
        },
    ),
    Section(
        "Account",
        {
            "login": Entry(f"{_CLI}.account:login", "Save the URL and API key of a server as a context."),
            "whoami": Entry(f"{_CLI}.account:whoami", "Show who your API key is."),
            "templates": Entry(f"{_CLI}.templates:app", "List templates, and show what they run."),
            "volumes": Entry(f"{_CLI}.volumes:app", "Manage the volumes of your project."),
            "secrets": Entry(f"{_CLI}.secrets:app", "Manage the secrets of your project."),
            "webhooks": Entry(f"{_CLI}.webhooks:app", "Send events to other services."),
            "projects": Entry(f"{_CLI}.projects:app", "List and manage projects."),
            "keys": Entry(f"{_CLI}.keys:app", "Manage API keys."),
            "ssh-config": Entry(f"{_CLI}.ssh.commands:ssh_config", "Print lines for ~/.ssh/config."),
            "ssh-prepare": Entry(f"{_CLI}.ssh.proxy:ssh_prepare", "Prepare a connection.", hidden=True),
            "ssh-proxy": Entry(f"{_CLI}.ssh.proxy:ssh_proxy", "Pass SSH through a WebSocket.", hidden=True),
            "docker-context": Entry(
                f"{_CLI}.account:docker_context", "Write the configuration of Docker clients."
            ),
            "compat": Entry(f"{_CLI}.compat:app", "Configure programs such as SkyPilot."),
            "mcp": Entry(f"{_CLI}.mcp:mcp", "Serve the Model Context Protocol, for coding agents."),
            "completion": Entry(
                f"{_CLI}.completion:completion", "Print the completion script of your shell."
            ),
            "version": Entry(f"{_CLI}.account:version", "Print the version."),
        },
    ),
)
