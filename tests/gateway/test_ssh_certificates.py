"""Which certificates log in. They are signed with the key of the service, as only the service can."""

import asyncio
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from cryptography.hazmat.primitives import serialization

from mooring.control import gateway_keys
from mooring.control.tenants.encryption import Encryptor, keys_in
from mooring.db.session import Database
from mooring.db.signals import Signals
from tests.gateway.conftest import HOST
from tests.walk.product import GatewayProcess, ServerProcess


@pytest.fixture(scope="module")
def ca_key(server: ServerProcess) -> asyncssh.SSHKey:
    database = Database(server.database_url, Signals())
    encryptor = Encryptor(keys_in(Path(server.environment["MOORING_DATA_DIR"])))
    with database.read() as session:
        key = gateway_keys.ca_key(session, encryptor)
    database.dispose()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    return asyncssh.import_private_key(pem)


@pytest.fixture(scope="module")
def holder(server: ServerProcess) -> str:
    with server.client as admin:
        return str(admin.get("/v1/me").json()["key"]["id"])


class CertificateClient:
    """Logs in with certificates of one key.

    Args:
        holder: the principal of a valid certificate.
    """

    def __init__(self, gateway: GatewayProcess, ca_key: asyncssh.SSHKey, holder: str) -> None:
        self._gateway, self._ca_key, self._holder = gateway, ca_key, holder
        self._key = asyncssh.generate_private_key("ssh-ed25519")

    def is_accepted(self, **fields: Any) -> bool:
        """Whether the gateway accepts a certificate with these fields, other than a valid one."""
        valid = {"principals": [self._holder], "valid_after": "-1h", "valid_before": "+1h"}
        made = self._ca_key.generate_user_certificate(self._key, "id", **valid | fields)
        return asyncio.run(self._logs_in(made))

    def is_accepted_as_host(self) -> bool:
        return asyncio.run(
            self._logs_in(self._ca_key.generate_host_certificate(self._key, "id", principals=[self._holder]))
        )

    async def _logs_in(self, certificate: asyncssh.SSHCertificate) -> bool:
        try:
            async with asyncssh.connect(
                HOST, self._gateway.ssh_port, username="x", client_keys=[(self._key, certificate)],
                known_hosts=None, config=None,
            ):  # fmt: skip
                return True
        except asyncssh.PermissionDenied:
            return False


@pytest.fixture
def client(gateway: GatewayProcess, ca_key: asyncssh.SSHKey, holder: str) -> CertificateClient:
    return CertificateClient(gateway, ca_key, holder)


def test_a_valid_certificate_logs_in_for_any_instance(client: CertificateClient) -> None:
    assert client.is_accepted()


def test_a_certificate_is_valid_from_its_begin_to_its_end(client: CertificateClient) -> None:
    assert not client.is_accepted(valid_before="-1m")
    assert not client.is_accepted(valid_after="+30m")


def test_a_certificate_has_exactly_one_principal(client: CertificateClient, holder: str) -> None:
    assert not client.is_accepted(principals=[])
    assert not client.is_accepted(principals=[holder, "x"])


def test_a_host_certificate_is_not_a_users(client: CertificateClient) -> None:
    assert not client.is_accepted_as_host()
