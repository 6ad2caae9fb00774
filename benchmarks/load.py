"""Low-overhead HTTP clients in a separate process."""

import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from urllib.parse import urlsplit

from tests.service import ADMIN_KEY

CLIENTS = 16
HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}


@dataclass(frozen=True)
class Load:
    """The results of all clients."""

    seconds: float
    latencies_s: list[float]
    cpu_s: float  # of the clients

    @property
    def rate(self) -> float:
        return len(self.latencies_s) / self.seconds


def closed_loop(
    url: str,
    method: str,
    path: str,
    body: dict[str, object] | None,
    seconds: float,
    *more_urls: str,
    clients: int = CLIENTS,
) -> Load:
    """Each client sends its next request once the last is answered. A status other than 2xx is an error.

    Args:
        path: `{client}` in it becomes the number of the client.
        more_urls: further replicas; the clients are spread over all of them.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_repeat, (url, *more_urls), method, path, body, seconds, clients).result()


def each(
    urls: Sequence[str], method: str, paths: Sequence[str], body: dict[str, object] | None = None
) -> Load:
    """Send one request per path. Each client sends its next one once the last is answered."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_send_each, urls, method, paths, body).result()


def _repeat(
    urls: Sequence[str],
    method: str,
    path: str,
    body: dict[str, object] | None,
    seconds: float,
    clients: int,
) -> Load:
    until = time.perf_counter() + seconds

    def paths(number: int) -> Iterator[str]:
        while time.perf_counter() < until:
            yield path.format(client=number)

    return _clients(urls, method, paths, body, clients)


def _send_each(
    urls: Sequence[str], method: str, paths: Sequence[str], body: dict[str, object] | None
) -> Load:
    return _clients(urls, method, lambda number: paths[number::CLIENTS], body, CLIENTS)


def _clients(
    urls: Sequence[str],
    method: str,
    paths: Callable[[int], Iterable[str]],
    body: dict[str, object] | None,
    clients: int,
) -> Load:
    """Run the clients.

    Args:
        paths: the paths of each client by its number.
    """
    content = None if body is None else json.dumps(body).encode()
    cpu_before = time.process_time()
    began = time.perf_counter()

    def client(number: int) -> list[float]:
        connection = http.client.HTTPConnection(urlsplit(urls[number % len(urls)]).netloc, timeout=30)
        taken = []
        for path in paths(number):
            sent_at = time.perf_counter()
            connection.request(method, path, content, HEADERS)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"{answer.status}: {text[:300]!r}")
            taken.append(time.perf_counter() - sent_at)
        connection.close()
        return taken

    with ThreadPoolExecutor(clients) as pool:
        latencies = [latency for taken in pool.map(client, range(clients)) for latency in taken]
    return Load(time.perf_counter() - began, latencies, time.process_time() - cpu_before)
