"""Commands without a terminal, with their exit codes checked; and a project with keys for them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from mooring.control.tenants import secrets
from tests.service import Client, RunningService
from tests.walk.cli_client import CliClient


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class CommandLine(CliClient):
    """Runs commands against one server."""

    def __call__(self, *arguments: str, given: str = "", code: int = 0) -> Finished:
        """Run a command without a terminal. Fail if it has another exit code."""
        done = self.run(*arguments, given=given.encode())
        found = Finished(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert found.code == code, (arguments, found)
        return found

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "-o", "json").out)


class Tenant:
    """A project with an owner, whose e-mail address is `NAME@example.org`.

    Attributes:
        member: the command with the key of a member without a user.
    """

    def __init__(self, service: RunningService, admin: Client, folder: Path) -> None:
        self.service, self.admin, self.folder = service, admin, folder
        self.name = f"tenant-{uuid4().hex[:8]}"
        self.id = self._post("/v1/projects", name=self.name)["id"]
        self.owner_id = self._post("/v1/users", name="Olga", email=f"{self.name}@example.org")["id"]
        path = f"/v1/projects/{self.id}/members/{self.owner_id}"
        assert admin.put(path, json={"role": "owner"}).status_code == 200
        self.owner = self.cli(role="owner", user_id=self.owner_id)
        self.member = self.cli(role="member")

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.admin.post(path, json=body)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def cli(self, **fields: Any) -> CommandLine:
        """The command with a new key of the project."""
        key = self._post("/v1/api-keys", name="of the test", project_id=self.id, **fields)
        return CommandLine(self.service.url, self.folder, key["key"])

    def secret(self, name: str) -> str:
        """The value of a secret, as instances get it."""
        with self.service.plane.database.read() as session:
            return secrets.values(session, self.service.plane.encryptor, [(self.id, name)])[self.id, name]
