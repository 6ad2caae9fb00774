"""The calls of the engine's HTTP API that the agent uses: typed, with a timeout, and with mapped errors.

Uses the low-level client of Docker's library, because its high-level objects send extra inspect requests.
"""

import json
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any, cast

from docker import APIClient
from docker.utils import kwargs_from_env
from docker.utils.utils import version_lt
from requests import Response

from mooring.agent.docker.byte_streams import ByteStream
from mooring.agent.docker.errors import EngineRefused, engine_call
from mooring.agent.docker.streams.engine_streams import EngineAddress, EngineApi
from mooring.agent.docker.transport import share_connections
from mooring.agent.runtime import RuntimeUnavailable

Document = dict[str, Any]

# The newest version of the API that this code was written for. It is used with newer engines too, so that an
# upgrade of Docker does not change their answers.
NEWEST_API = "1.51"
_OLDEST_API = "1.41"  # of the client that asks for the engine's version
# A start may take this multiple of the timeout: the NVIDIA hooks take seconds if the driver is not loaded.
_START_TIMEOUT_FACTOR = 6
_POOL_SIZE = 64


class Engine:
    """A client of one engine. Connects at the first request, so an agent may start before its engine.

    Every request may raise RuntimeUnavailable, and EngineRefused for an error response.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, timeout_s: int = 10) -> None:
        self._environment = dict(environment) if environment is not None else None
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._default: APIClient | None = None
        self._streaming: APIClient | None = None
        self._streams: weakref.WeakSet[ByteStream] = weakref.WeakSet()
        self._closed = False

    def ping(self) -> None:
        with engine_call("ping"):
            self._client().ping()

    def info(self) -> Document:
        """Return `docker info`, with the `Components` of `docker version`."""
        with engine_call("info"):
            components = self._client().version(api_version=False).get("Components")
            return {**self._client().info(), "Components": components}

    def image(self, reference: str) -> Document:
        with engine_call("inspect image"):
            return cast(Document, _untyped(self._client()).inspect_image(reference))

    def images(self) -> list[Document]:
        with engine_call("list images"):
            return cast(list[Document], self._client().images())

    def image_ids(self) -> set[str]:
        return {str(image["Id"]) for image in self.images()}

    def image_ids_in_use(self) -> set[str]:
        """Return the ids of the images of all containers, in any state, including foreign containers."""
        with engine_call("list containers"):
            return {str(each["ImageID"]) for each in self._client().containers(all=True)}

    def import_image(self, archive: bytes, reference: str) -> None:
        repository, _, tag = reference.rpartition(":")
        with engine_call("import image"):
            source = {"fromSrc": "-", "repo": repository, "tag": tag}
            self._request("POST", "/images/create", params=source, data=archive)

    def remove_image(self, reference: str) -> None:
        with engine_call("remove image"):
            _untyped(self._client()).remove_image(reference)

    def registry_digest(self, image: str, headers: Mapping[str, str]) -> str:
        """Return the digest of an image in its registry. The engine contacts the registry.

        Raises:
            EngineRefused: the registry denied access, has no such image, or cannot be reached.
        """
        with engine_call("inspect image in registry"):
            response = self._request("GET", f"/distribution/{image}/json", headers=dict(headers))
            return str(response.json()["Descriptor"]["digest"])

    def create(self, config: Document, name: str) -> str:
        with engine_call("create"):
            created = _untyped(self._client()).create_container_from_config(config, name)
            return str(created["Id"])

    def start(self, container: str) -> None:
        with engine_call("start"):
            self._request("POST", f"/containers/{container}/start", timeouts=_START_TIMEOUT_FACTOR)

    def container(self, container: str) -> Document:
        with engine_call("inspect"):
            return cast(Document, self._client().inspect_container(container))

    def containers(self, label: str) -> list[Document]:
        with engine_call("list containers"):
            return list(self._client().containers(all=True, filters={"label": [label]}))

    def kill(self, container: str, signal: str = "SIGKILL") -> None:
        with engine_call("kill"):
            self._client().kill(container, signal)

    def limit_cpus(self, container: str, cpus: int) -> None:
        """Change the CPU limit of a running container. Docker's library has no call for `NanoCpus`."""
        with engine_call("update"):
            self._request("POST", f"/containers/{container}/update", json={"NanoCpus": cpus * 10**9})

    def wait(self, container: str, timeout_s: float) -> None:
        with engine_call("wait"):
            self._client().wait(container, timeout=timeout_s)  # type: ignore[arg-type]  # a float is fine

    def remove(self, container: str, *, force: bool = False) -> None:
        with engine_call("remove"):
            self._client().remove_container(container, v=True, force=force)

    def networks(self, label: str) -> list[Document]:
        with engine_call("list networks"):
            return cast(list[Document], self._client().networks(filters={"label": [label]}))

    def network(self, name: str) -> Document:
        with engine_call("inspect network"):
            return cast(Document, _untyped(self._client()).inspect_network(name))

    def create_network(self, config: Document) -> None:
        with engine_call("create network"):
            self._request("POST", "/networks/create", json=config)

    def remove_network(self, network: str) -> None:
        with engine_call("remove network"):
            self._client().remove_network(network)

    def volumes(self, label: str) -> list[Document]:
        with engine_call("list volumes"):
            answer = self._request("GET", "/volumes", params={"filters": json.dumps({"label": [label]})})
            return list(answer.json()["Volumes"] or ())

    def volume(self, name: str) -> Document:
        with engine_call("inspect volume"):
            return cast(Document, self._request("GET", f"/volumes/{name}").json())

    def create_volume(self, config: Document) -> None:
        """Create a volume. Has no effect if one of that name exists."""
        with engine_call("create volume"):
            self._request("POST", "/volumes/create", json=config)

    def remove_volume(self, name: str) -> None:
        with engine_call("remove volume"):
            self._request("DELETE", f"/volumes/{name}")

    def archive(self, container: str, path: str) -> bytes:
        """Return a file or folder of a container, running or not, as a tar archive."""
        with engine_call("read archive"):
            return self._request("GET", f"/containers/{container}/archive", params={"path": path}).content

    def put_archive(self, container: str, archive: bytes) -> None:
        """Extract a tar archive into the root of a container."""
        with engine_call("write archive"):
            self._request("PUT", f"/containers/{container}/archive", params={"path": "/"}, data=archive)

    def streams(self) -> EngineApi:
        """The calls to this engine that wait in an event loop."""
        environment = os.environ if self._environment is None else self._environment
        return EngineApi(EngineAddress.from_environment(environment), self._known_version, self._version)

    def stream(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        json: Document | None = None,
        headers: Mapping[str, str] | None = None,
        headers_in_s: float | None = None,
    ) -> ByteStream:
        """Send a request whose response is streamed. An error of the engine is raised at the first read.

        Args:
            headers_in_s: how long the engine may take to send the headers of its response.
        """

        def request() -> Response:
            client = self._client(streaming=True)
            url = self._url(client, path)
            timeout = (self._timeout_s, headers_in_s)
            response = client.request(
                method, url, params=params, json=json, headers=headers, stream=True, timeout=timeout
            )
            return self._without_timeout(client, response)

        stream = ByteStream(request)
        with self._lock:
            self._streams.add(stream)
            closed = self._closed
        if closed:
            stream.close()
        return stream

    def close(self) -> None:
        """End all streams. Later calls raise RuntimeUnavailable."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
            self._forget_clients()
        for stream in streams:
            stream.close()

    def forget_version(self) -> None:
        """Negotiate the API version again at the next request: the engine may have been upgraded."""
        with self._lock:
            self._forget_clients()

    def _forget_clients(self) -> None:
        for client in (self._default, self._streaming):
            if client is not None:
                client.close()
        self._default = self._streaming = None

    def _request(self, method: str, path: str, *, timeouts: int = 1, **content: Any) -> Response:
        """Send a request itself, because some methods of Docker's library set no timeout.

        Args:
            timeouts: how many times the usual timeout the answer may take.
            content: `json`, `data`, `params` and `headers`, as for `requests`.
        """
        client = self._client()
        timeout_s = self._timeout_s * timeouts
        response = client.request(method, self._url(client, path), timeout=timeout_s, **content)
        self._check(client, response)
        return response

    def _client(self, *, streaming: bool = False) -> APIClient:
        with self._lock:
            if self._closed:
                raise RuntimeUnavailable("the agent has closed its connection to the container engine")
            if self._default is None or self._streaming is None:
                version = self._negotiate()
                self._default = self._connect(version)
                # A separate pool, so that followed logs do not use all connections that a kill needs.
                self._streaming = self._connect(version)
            return self._streaming if streaming else self._default

    def _known_version(self) -> str | None:
        client = self._default
        return None if client is None else str(client.api_version)

    def _version(self) -> str:
        with engine_call("version"):
            return str(self._client().api_version)

    def _negotiate(self) -> str:
        # Docker's library negotiates in the client's constructor, before `share_connections`.
        client = self._connect(_OLDEST_API)
        try:
            newest = str(client.version(api_version=False)["ApiVersion"])
        finally:
            client.close()
        return NEWEST_API if version_lt(NEWEST_API, newest) else newest

    def _connect(self, version: str) -> APIClient:
        arguments = kwargs_from_env(self._environment)
        client = APIClient(version=version, timeout=self._timeout_s, max_pool_size=_POOL_SIZE, **arguments)
        share_connections(client, self._timeout_s, _POOL_SIZE)
        return client

    def _without_timeout(self, client: APIClient, response: Response) -> Response:
        self._check(client, response)
        # The timeout was for the headers; a container may print nothing for days.
        library = _untyped(client)
        library._disable_socket_timeout(library._get_raw_response_socket(response))
        return response

    @staticmethod
    def _check(client: APIClient, response: Response) -> None:
        try:
            _untyped(client)._raise_for_status(response)
        except Exception:
            response.close()
            raise

    @staticmethod
    def _url(client: APIClient, path: str) -> str:
        return f"{client.base_url}/v{client.api_version}{path}"


def is_gone(refusal: EngineRefused) -> bool:
    """Return whether a failed stop or remove has nothing left to do."""
    return refusal.status == 404 or "already in progress" in refusal.message


def remove_container(engine: Engine, container: str, *, force: bool) -> None:
    """Remove a container. Succeeds if it does not exist, or is being removed."""
    try:
        engine.remove(container, force=force)
    except EngineRefused as refusal:
        if not is_gone(refusal):
            raise


def find_network(engine: Engine, name: str) -> Document | None:
    try:
        found = engine.network(name)
    except EngineRefused as refusal:
        if refusal.status == 404:
            return None
        raise
    # The engine also finds a network by the beginning of its id.
    return found if found["Name"] == name else None


def _untyped(client: APIClient) -> Any:  # for members that the stubs of Docker's library omit
    return client
