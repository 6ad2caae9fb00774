"""`mooring compat`: configuration for programs that speak the API of another service."""

import json
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mooring_client.cli import values
from mooring_client.cli.session import connect, project_id, say
from mooring_client.errors import MooringError, NotFound
from mooring_client.failures import ClientFailure, NotConfigured

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    help="Configure programs that speak the API of another service.",
)  # fmt: skip

_CONFIG: Final = PurePosixPath(".prime/config.json")
_RECORD: Final = PurePosixPath(".prime/mooring-files.json")
_FACADE: Final = "/compat/prime"
# What SkyPilot does: create and delete pods, and register the SSH key to log in with.
_SCOPES: Final = ["instances:read", "instances:write", "instances:exec"]
# A key that ends sooner is replaced.
_RENEWED_BEFORE: Final = timedelta(days=7)


@app.callback()
def group() -> None:
    """Configure programs that speak the API of another service."""


@app.command()
def skypilot(
    folder: Annotated[Path, typer.Option(help="the home folder of the user of SkyPilot")] = Path("~"),
    expires: Annotated[str, typer.Option(help="of the API key that is made: 12h, 30d")] = "30d",
    key_from: Annotated[
        Path | None, typer.Option(help="a file with an API key to use instead of making one; - is stdin")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace files that others wrote")] = False,
) -> None:
    """Let SkyPilot launch on this server: write its API key, and the catalog of what can be launched.

    SkyPilot takes the server for Prime Intellect, and copies the key onto the instances that it launches. So
    the key can only use instances of one project, and expires. Run this again when nodes were added, or to
    renew the key; `sky launch` then registers SSH again.
    """
    from mooring_client.cli import skypilot_catalog
    from mooring_client.cli.written_files import WrittenFiles

    written = WrittenFiles(folder.expanduser().absolute(), _RECORD)
    with connect() as client:
        texts = _catalog(client)
        for shared in (skypilot_catalog.ACCELERATORS, skypilot_catalog.METADATA):
            if written.is_foreign(shared) and not force:
                say(f"kept {written.path(shared)}, which SkyPilot downloaded")
                del texts[shared]
        if not force:
            written.require_own([*texts, _CONFIG])
        url = f"{client.endpoint.url}{_FACADE}"
        config = {"api_key": _key(client, written.path(_CONFIG), url, key_from, expires), "base_url": url}
    texts[_CONFIG] = json.dumps(config, indent=2) + "\n"
    try:
        written.write(texts)
    except OSError as error:
        raise ClientFailure(f"cannot write {error.filename}: {error.strerror}") from None
    for name in texts:
        print(f"wrote {written.path(name)}")
    say("next: sky check primeintellect && sky launch --infra primeintellect --gpus MODEL:COUNT COMMAND")


def _catalog(client: "Mooring") -> dict[PurePosixPath, str]:
    from mooring_client.cli import skypilot_catalog
    from mooring_client.cli.resources import every

    types = client.request("GET", "/v1/instance-types")["items"]
    return skypilot_catalog.catalog(types, every(client, "/v1/nodes"))


def _key(client: "Mooring", config: Path, url: str, key_from: Path | None, expires: str) -> str:
    """A key that the facade accepts: the given one, that of an earlier run, or a new one."""
    if key_from is not None:
        given = _read_key(key_from)
        _require_accepted(client, given)
        return given
    kept = _kept_key(client, config, url)
    return kept or _new_key(client, timedelta(seconds=values.seconds(expires)))


def _read_key(file: Path) -> str:
    try:
        found = sys.stdin.readline() if str(file) == "-" else file.expanduser().read_text()
    except (OSError, UnicodeError) as error:
        raise NotConfigured(f"cannot read the key: {error}") from None
    if not found.strip():
        raise NotConfigured(f"there is no key in {file}")
    return found.strip()


def _require_accepted(client: "Mooring", key: str) -> Any:
    """Who the key is, as in GET /v1/me.

    Raises:
        MooringError: it is not valid, or may not see pods.
        NotFound: the server is of a release without this facade.
    """
    from mooring_client.sync.client import Mooring

    with Mooring(client.endpoint.url, key) as own:
        try:
            own.request("GET", f"{_FACADE}/api/v1/pods")
        except NotFound:
            raise NotFound("this server is of an older release, which SkyPilot cannot use") from None
        return own.request("GET", "/v1/me")


def _kept_key(client: "Mooring", config: Path, url: str) -> str | None:
    """The key of an earlier run for this server; None: there is none, or it soon expires."""
    try:
        found = json.loads(config.read_text())
        key, is_here = found["api_key"], found["base_url"] == url
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if not is_here or not isinstance(key, str):
        return None
    with suppress(MooringError):
        expires_at = (_require_accepted(client, key)["key"] or {}).get("expires_at")
        if expires_at is None or datetime.fromisoformat(expires_at) - datetime.now(UTC) > _RENEWED_BEFORE:
            say(f"kept the key, which expires {'never' if expires_at is None else f'at {expires_at}'}")
            return key
    return None


def _new_key(client: "Mooring", lifetime: timedelta) -> str:
    from socket import gethostname

    from mooring_client.calls import body

    me = client.request("GET", "/v1/me")
    wanted = body(
        name=f"skypilot@{gethostname()}",
        scopes=_SCOPES,
        project_id=project_id(client),
        user_id=me["user"]["id"] if me["user"] else None,
        expires_at=(datetime.now(UTC) + lifetime).isoformat(),
    )
    made = client.request("POST", "/v1/api-keys", body=wanted)
    _require_accepted(client, made["key"])
    say(f"created the key {made['name']} ({made['id']}): {', '.join(made['scopes'])}; it expires at "
        f"{made['expires_at']}")  # fmt: skip
    return str(made["key"])
