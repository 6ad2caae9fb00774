"""What SSH clients need of a server: a certificate for a key of this machine, and where the gateway is.

It is kept in `~/.config/mooring/ssh/`, which only its owner can read, and renewed half an hour later, so that
most connections need no request. The host keys come from the API: no connection trusts a key on first use.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, Final

from mooring_client.endpoint import Endpoint, config_file
from mooring_client.errors import MooringError
from mooring_client.failures import BadAnswer, ClientFailure, ConnectionFailed

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

# Half of it remains for connections while the API cannot be reached.
_CERTIFICATE_S: Final = 3600
_RENEWED_AFTER_S: Final = 1800
# The server's answers become options of OpenSSH, so they must have no character with a meaning there.
_HOST: Final = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:_-]*")
_HOST_KEY: Final = re.compile(r"[a-z0-9@.-]+ [A-Za-z0-9+/=]+")
_WEBSOCKET_URL: Final = re.compile(r"wss?://[A-Za-z0-9.:\[\]/_-]+")
_CERTIFICATE: Final = re.compile(r"[a-z0-9@.-]+ [A-Za-z0-9+/=]+( [^\n]*)?\n?")
_PACKAGES: Final = "apt install openssh-client, dnf install openssh-clients, or apk add openssh-client"


@dataclass(frozen=True, slots=True)
class LocalKey:
    """An SSH key of this machine.

    Attributes:
        private: the file for `IdentityFile`.
        public: the line of its `.pub` file.
    """

    private: Path
    public: str

    @property
    def is_security_key(self) -> bool:
        """Whether it is in a FIDO token. The server does not certify those; their owner registers them."""
        return self.public.startswith("sk-")


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """How to log in to the gateways of a server, until a time.

    Attributes:
        name: of its files, and of the gateways in `known_hosts`.
        websocket_url: the way in if the SSH port cannot be reached.
        renewed_at, expires_at: seconds since the epoch.
    """

    name: str
    host: str
    port: int
    host_keys: list[str]
    websocket_url: str
    renewed_at: float
    expires_at: float

    @property
    def certificate(self) -> Path:
        return folder() / f"{self.name}-cert.pub"

    @property
    def known_hosts(self) -> Path:
        return folder() / f"{self.name}.known_hosts"

    def is_fresh(self, now: float) -> bool:
        # A clock that was wrong at the renewal, or is wrong now, must not keep an old certificate.
        return self.renewed_at <= now < min(self.renewed_at + _RENEWED_AFTER_S, self.expires_at)


def folder() -> Path:
    """The folder of all files for SSH."""
    return config_file().parent / "ssh"


def program(name: str) -> str:
    """The path of a program of OpenSSH's client.

    Raises:
        ClientFailure: it is not installed.
    """
    if found := shutil.which(name):
        return found
    raise ClientFailure(f"there is no program {name!r}; install OpenSSH's client: {_PACKAGES}")


@contextmanager
def explained_files() -> Iterator[None]:
    """Within the block, files that cannot be read or written become a ClientFailure."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise ClientFailure(f"cannot prepare SSH: {error}") from None


def write_private(file: Path, text: str) -> None:
    """Write a file that its owner alone can read; other processes see the old or the new content.

    Args:
        text: bytes that are no UTF-8 are surrogates.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as output:
        output.write(text.encode(errors="surrogateescape"))
    new.replace(file)


def local_key(chosen: Path | None) -> LocalKey:
    """The key to log in with.

    Args:
        chosen: the file of a key of the user; None: the key of this command, which is made once.

    Raises:
        ClientFailure: there is no such key, or it cannot be read.
    """
    private = folder() / "id_ed25519" if chosen is None else chosen.expanduser().absolute()
    if chosen is None and not private.exists():
        _generate(private)
    public = private if private.suffix == ".pub" else private.with_name(f"{private.name}.pub")
    if public.exists():
        return LocalKey(private, public.read_text().strip())
    if not private.exists():
        raise ClientFailure(f"there is no key {private}")
    return LocalKey(private, _run("ssh-keygen", "-y", "-f", str(private)).strip())


def _generate(private: Path) -> None:
    private.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(private.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if private.exists():  # another process was faster
            return
        new, new_public = private.with_name(".new"), private.with_name(".new.pub")
        new.unlink(missing_ok=True)
        comment = f"mooring@{gethostname()}"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(new))
        new_public.replace(private.with_name(f"{private.name}.pub"))
        new.replace(private)
    finally:
        os.close(lock)


def _run(name: str, *arguments: str) -> str:
    """Run a program of OpenSSH; it may ask for a passphrase on the terminal. Returns its output."""
    argv = [program(name), *arguments]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise ClientFailure(f"{name} failed with exit code {done.returncode}")
    return done.stdout


def current_access(
    endpoint: Endpoint, key: LocalKey, connected: Callable[[], AbstractContextManager["Mooring"]]
) -> GatewayAccess:
    """The access, renewed if it is old. If that fails for a reason that may pass, the old one is still used.

    Args:
        connected: a client of the endpoint; called only for a renewal.

    Raises:
        MooringError, ClientFailure: it cannot be renewed.
    """
    stored, now = _stored(endpoint, key), time.time()
    if stored is not None and stored.is_fresh(now):
        return stored
    try:
        with connected() as client:
            return renewed_access(client, key)
    except (MooringError, ConnectionFailed) as failure:
        may_pass = isinstance(failure, ConnectionFailed) or failure.retryable
        if stored is not None and may_pass and now < stored.expires_at:
            return stored
        raise


def renewed_access(client: "Mooring", key: LocalKey) -> GatewayAccess:
    """Get a certificate, and the address and the host keys of the gateway.

    Raises:
        MooringError, ClientFailure: as the requests.
        BadAnswer: the answers cannot be used.
    """
    address, now = client.request("GET", "/v1/me/ssh"), time.time()
    signed = None
    if not key.is_security_key:
        asked = {"public_key": key.public, "ttl_s": _CERTIFICATE_S}
        signed = client.request("POST", "/v1/ssh-certificates", body=asked)
    try:
        certificate = signed and _checked(_CERTIFICATE, signed["certificate"])
        access = GatewayAccess(
            name=_name(client.endpoint, key),
            host=_checked(_HOST, address["host"]),
            port=_port(address["port"]),
            host_keys=[_checked(_HOST_KEY, each) for each in address["host_keys"]],
            # An older server does not say it. Where one host serves both, the gateway has the path.
            websocket_url=websocket_url(
                address.get("websocket_url") or f"{client.endpoint.websocket_url}/v1/ssh"
            ),
            renewed_at=now,
            expires_at=_timestamp(signed["expires_at"]) if signed else now + _CERTIFICATE_S,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"the server's answer cannot be used for SSH: {error!r}") from None
    with explained_files():
        if certificate:
            write_private(access.certificate, certificate)
        lines = [f"{gateway_alias(access.name)} {each}\n" for each in access.host_keys]
        write_private(access.known_hosts, "".join(lines))
        write_private(_file(access.name), json.dumps(asdict(access)))
    return access


def gateway_alias(name: str) -> str:
    """The name of the gateways in `known_hosts`: it does not depend on the way by which they are reached."""
    return f"mooring-{name}"


def websocket_url(url: str) -> str:
    """The URL, if it is one that OpenSSH's configuration can hold.

    Raises:
        BadAnswer: it is not.
    """
    return _checked(_WEBSOCKET_URL, url)


def _checked(pattern: re.Pattern[str], text: Any) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise BadAnswer(f"{text!r} cannot be used for SSH")
    return text


def _port(given: Any) -> int:
    if (port := int(given)) not in range(1, 65_536):
        raise ValueError(f"port {port}")
    return port


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _name(endpoint: Endpoint, key: LocalKey) -> str:
    """A certificate acts as one API key, for one SSH key, at one server."""
    return hashlib.sha256("\n".join((endpoint.url, endpoint.api_key, key.public)).encode()).hexdigest()[:16]


def _file(name: str) -> Path:
    return folder() / f"{name}.json"


def _stored(endpoint: Endpoint, key: LocalKey) -> GatewayAccess | None:
    try:
        found = GatewayAccess(**json.loads(_file(_name(endpoint, key)).read_text()))
    except (OSError, ValueError, TypeError):  # absent, or of another release
        return None
    complete = found.known_hosts.exists() and (key.is_security_key or found.certificate.exists())
    return found if complete else None
