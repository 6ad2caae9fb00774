"""Commands on the account: login, whoami, docker-context."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

import mooring_client
from mooring_client.cli.output import Format, FormatOption, show_one
from mooring_client.cli.session import connect, say
from mooring_client.endpoint import DEFAULT_URL, Config, checked_url, config_file, read_config
from mooring_client.failures import NoApiKey


def login(
    server: Annotated[str | None, typer.Argument(metavar="[URL]", help="of the server")] = None,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="of the context; default: the host")
    ] = None,
    project: Annotated[str | None, typer.Option(help="the project of commands that name none")] = None,
    url: Annotated[str | None, typer.Option("--url", help="the same as the argument")] = None,
) -> None:
    """Save the URL and API key of a server as a context, and make it the current one.

    The key is read from the terminal, or from stdin if that is a pipe; it is never an argument, which other
    users of this machine could see.
    """
    insecure = os.environ.get("MOORING_INSECURE_HTTP", "").lower() in {"1", "true", "yes"}
    if server and url:
        raise typer.BadParameter("give the URL once", param_hint="--url")
    checked = checked_url(server or url or DEFAULT_URL, insecure=insecure)
    key = _read_key(checked)
    from mooring_client.sync.client import Mooring

    with Mooring(checked, key) as client:
        me = client.request("GET", "/v1/me")
    file = config_file()
    context = name or urlsplit(checked).hostname or "default"
    config = read_config(file)
    added = {"url": checked, "api_key": key, **({"project": project} if project else {})}
    save(file, Config(context, {**config.contexts, context: added}))
    say(f"logged in to {checked} as {_who(me)}; saved as context {context!r} in {file}")


def _read_key(url: str) -> str:
    if sys.stdin.isatty():
        key = str(typer.prompt(f"API key for {url}", hide_input=True, err=True))
    else:
        key = sys.stdin.readline()
    if not key.strip():
        raise NoApiKey("there is no key on stdin: mooring login URL <key-file")
    return key.strip()


def save(file: Path, config: Config) -> None:
    """Write the configuration, readable for its owner only, and never half of it."""
    lines = [f"current = {_quoted(config.current)}"] if config.current else []
    for name, context in config.contexts.items():
        lines += ["", f"[contexts.{_quoted(name)}]"]
        lines += [f"{_quoted(field)} = {_quoted(str(value))}" for field, value in context.items()]
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as output:
        output.write("\n".join(lines) + "\n")
    new.replace(file)


def _quoted(text: str) -> str:
    """A basic string of TOML, which has the escapes of JSON."""
    import json

    return json.dumps(text).replace("\x7f", "\\u007f")


def _who(me: Any) -> str:
    who = me["user"] or me["key"]
    return f"{who['name']} (admin)" if me["is_admin"] else str(who["name"])


def whoami(output: FormatOption = Format.TABLE) -> None:
    """Show who your API key is, and what it may do.

    The JSON is the object of GET /v1/me.
    """
    with connect() as client:
        me = client.request("GET", "/v1/me")
        url = client.endpoint.url
    projects = [f"{each['name']} ({each['role'] or ', '.join(each['scopes'])})" for each in me["projects"]]
    fields = [
        ("server", url),
        ("you", _who(me)),
        ("project", me["project"]["name"] if me["project"] else "-"),
        ("projects", "all" if me["is_admin"] else ", ".join(projects) or "-"),
        ("scopes", ", ".join(me["scopes"]) or "-"),
        ("key expires", (me["key"] or {}).get("expires_at") or "never"),
    ]
    show_one(me, output, fields)


def docker_context(
    folder: Annotated[Path, typer.Argument(help="for the configuration of Docker")] = Path(
        "~/.mooring-docker"
    ),
) -> None:
    """Write the configuration with which Docker's own tools use instances as containers."""
    import json

    with connect() as client:
        found = client.request("GET", "/v1/docker-context")
    target = folder.expanduser()
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = target / "config.json"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as output:
        json.dump(found["config.json"], output, indent=2)
    print(f"export DOCKER_CONFIG={target} DOCKER_HOST={found['host']}")


def version() -> None:
    """Print the version of this program; that of the server is in GET /v1/versions."""
    print(mooring_client.__version__)
