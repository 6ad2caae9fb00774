"""A certified OpenID provider (npm's oidc-provider) in its own process; see provider.mjs."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key as generate_rsa_key
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from tests.sso.token_requests import SHARED_TLS
from tests.testbed.processes import Daemon
from tests.testbed.workspace import Workspace

FOLDER = Path(__file__).parent
AUDIENCE = "https://mooring.test"
CLIENTS = {name: f"the-secret-of-{name}" for name in ("ada", "bob", "eve")}


def require() -> None:
    """Skips the test if the provider is not installed; fails it under CI=true."""
    if shutil.which("node") and (FOLDER / "node_modules" / ".installed").exists():
        return
    reason = "oidc-provider: not installed; run tests/testbed/install.sh"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class Provider:
    """A provider that keeps its port, and so its issuer URL, across restarts."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._port = workspace.take_port()
        self._folder = workspace.folder(f"sso-{self._port}")
        self._settings = self._folder / "settings.json"
        self._daemon = Daemon(
            "oidc-provider", ["node", str(FOLDER / "provider.mjs"), str(self._settings)], self._folder
        )
        self.issuer = f"http://127.0.0.1:{self._port}"
        self.keys: list[dict[str, Any]] = new_keys()

    def start(self) -> None:
        """Start with the current keys."""
        settings = {"port": self._port, "jwks": {"keys": self.keys}, "clients": CLIENTS}
        self._settings.write_text(json.dumps(settings))
        self._daemon.start(self._is_ready)

    def stop(self) -> None:
        self._daemon.stop()

    def freeze(self) -> None:
        self._daemon.freeze()

    def thaw(self) -> None:
        self._daemon.thaw()

    def rotate(self) -> None:
        """Restart with new keys."""
        self.stop()
        self.keys = new_keys()
        self.start()

    def destroy(self) -> None:
        self._daemon.kill()
        self._workspace.give_back_port(self._port)

    def token(self, client_id: str = "ada", audience: str = AUDIENCE, **wanted: Any) -> str:
        """An access token of a client; provider.mjs describes `wanted`."""
        answer = httpx.post(
            f"{self.issuer}/token",
            auth=(client_id, CLIENTS[client_id]),
            data={
                "grant_type": "client_credentials",
                "resource": audience,
                "wanted": json.dumps(wanted),
            },
            verify=SHARED_TLS,
        )
        assert answer.status_code == 200, f"{answer.text}\n{self._daemon.log_tail()}"
        return str(answer.json()["access_token"])

    def signed_again(
        self, token: str, *, claims: Mapping[str, Any] | None = None, header: Mapping[str, Any] | None = None
    ) -> str:
        """The token with changed claims and header fields (None: removed), signed with the ES256 key."""
        new_claims = jwt.decode(token, options={"verify_signature": False}) | dict(claims or {})
        new_header = jwt.get_unverified_header(token) | dict(header or {})
        return jwt.encode(
            {name: value for name, value in new_claims.items() if value is not None},
            jwt.PyJWK(self.keys[0]),
            headers={name: value for name, value in new_header.items() if value is not None},
        )

    def served(self, path: str) -> int:
        """The number of requests for a path since the last start."""
        return int(httpx.get(f"{self.issuer}/served", verify=SHARED_TLS).json().get(path, 0))

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.issuer}/served", verify=SHARED_TLS).status_code == 200
        except httpx.ConnectError:
            return False


def new_keys() -> list[dict[str, Any]]:
    """A new EC, RSA and Ed25519 key, each as a private JWK."""
    keys = (
        ECAlgorithm.to_jwk(generate_private_key(SECP256R1()), as_dict=True),
        RSAAlgorithm.to_jwk(generate_rsa_key(65537, 2048), as_dict=True),
        OKPAlgorithm.to_jwk(Ed25519PrivateKey.generate(), as_dict=True),
    )
    for key in keys:
        # PyJWT sets `key_ops` of an RSA key to ["sign"]. The provider would publish it for the public key.
        key.pop("key_ops", None)
    return [{**key, "kid": token_hex(8), "use": "sig"} for key in keys]
