"""A real image registry on the nodes' network, and images to pull from it."""

import gzip
import hashlib
import json
import random
import socket
from pathlib import Path
from typing import Any

import httpx

from tests.testbed import images, isolation
from tests.testbed.parts import program
from tests.testbed.processes import Daemon
from tests.testbed.workspace import Workspace

MEGABYTE = 1_000_000
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIGURATION = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"

PASSWORDS = {"alice": "alice-keeps-this", "bob": "bob-keeps-that"}
# The same passwords as bcrypt hashes, the only format that the registry accepts. As constants, they need no
# `htpasswd` program.
HTPASSWD = """\
alice:$2b$04$AAJUEqTGuV1LmQHHV8hl0e0ZlksPpEmG/01K/wnmyUhY4.eMFQfHC
bob:$2b$04$qu/lfxHp4.7lKEgpOe1FueTO6AepFCSxiVfk0B/NcY58TxrIzTJDq
"""


class Registry:
    """Debian's docker-registry. Nodes pull from its subnet over plain HTTP (insecure registries).

    A private registry requires a login with one of PASSWORDS; each of them may read all images.
    """

    def __init__(self, workspace: Workspace, *, private: bool = False) -> None:
        isolation.make_bridge(workspace.prefix, workspace.root_address)
        self._host = workspace.root_address
        self._port = workspace.take_port()
        self.name = f"{self._host}:{self._port}"
        self.url = f"http://{self.name}"
        self._private = private
        folder = workspace.folder(f"registry-{self._port}")
        argv = [program("docker-registry"), "serve", str(self._write_configuration(folder))]
        self.daemon = Daemon("docker-registry", argv, folder)

    def start(self) -> None:
        if not self.daemon.running:
            self.daemon.start(self._accepts)

    def stop(self) -> None:
        self.daemon.stop()

    def kill(self) -> None:
        self.daemon.kill()

    def freeze(self) -> None:
        """Freeze the registry: running pulls make no progress and get no error."""
        self.daemon.freeze()

    def thaw(self) -> None:
        self.daemon.thaw()

    def add_image(
        self,
        repository: str,
        tag: str = "1",
        *,
        extra_layers: int = 0,
        layer_bytes: int = MEGABYTE,
        edition: int = 1,
        zeros_bytes: int = 0,
    ) -> str:
        """Publish busybox with `extra_layers` more layers of random bytes. Return the image's reference.

        Random bytes do not compress, so a pull downloads their full size. They depend on the image's name, so
        that images share no such layer.

        Args:
            edition: another number moves the tag to another image.
            zeros_bytes: adds a layer of this size that is tiny until it is unpacked.
        """
        random_bytes = random.Random(f"{repository}:{tag}" + "*" * (edition - 1))
        layers = [images.busybox_layer()]
        for number in range(extra_layers):
            layers.append(images.single_file_layer(f"layer-{number}", random_bytes.randbytes(layer_bytes)))
        if zeros_bytes:
            layers.append(images.single_file_layer("zeros", bytes(zeros_bytes)))
        with self._client() as client:
            manifest = _upload(client, repository, layers)
            put = client.put(
                f"/v2/{repository}/manifests/{tag}", content=manifest, headers={"Content-Type": MANIFEST}
            )
            put.raise_for_status()
        return f"{self.name}/{repository}:{tag}"

    def digest(self, reference: str) -> str:
        """Return the digest (`sha256:…`) of a reference's current manifest."""
        repository, _, tag = reference.removeprefix(f"{self.name}/").rpartition(":")
        with self._client() as client:
            answer = client.head(f"/v2/{repository}/manifests/{tag}", headers={"Accept": MANIFEST})
        return str(answer.raise_for_status().headers["Docker-Content-Digest"])

    def _client(self) -> httpx.Client:
        auth = ("alice", PASSWORDS["alice"]) if self._private else None
        return httpx.Client(base_url=self.url, auth=auth, timeout=30, verify=False)

    def _write_configuration(self, folder: Path) -> Path:
        configuration: dict[str, Any] = {
            "version": "0.1",
            "log": {"level": "info"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
            "http": {"addr": self.name},
        }
        if self._private:
            accounts = folder / "htpasswd"
            accounts.write_text(HTPASSWD)
            configuration["auth"] = {"htpasswd": {"realm": "mooring-tests", "path": str(accounts)}}
        # JSON is YAML.
        path = folder / "config.yml"
        path.write_text(json.dumps(configuration))
        return path

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self._host, self._port)) == 0


def _upload(client: httpx.Client, repository: str, layers: list[bytes]) -> bytes:
    """Upload an image's layers and configuration. Return its manifest."""
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": [images.WAITER], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer) for layer in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _upload_blob(client, repository, json.dumps(configuration).encode(), CONFIGURATION),
        "layers": [_upload_blob(client, repository, _compressed(layer), LAYER) for layer in layers],
    }
    return json.dumps(manifest).encode()


def _upload_blob(
    client: httpx.Client, repository: str, content: bytes, media_type: str
) -> dict[str, str | int]:
    digest = _digest(content)
    upload = client.post(f"/v2/{repository}/blobs/uploads/").raise_for_status().headers["Location"]
    location = httpx.URL(upload).copy_merge_params({"digest": digest})
    headers = {"Content-Type": "application/octet-stream"}
    client.put(location, content=content, headers=headers).raise_for_status()
    return {"mediaType": media_type, "digest": digest, "size": len(content)}


def _compressed(layer: bytes) -> bytes:
    """Compress with a fixed time, so that equal layers are equal blobs."""
    return gzip.compress(layer, compresslevel=1, mtime=0)


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
