"""Low-overhead HTTP clients in a separate process."""

import http.client
import json
import time
from collections.abc import Sequence
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
    cpu_s: float = 0.0  # of the clients

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
        return process.submit(_clients, (url, *more_urls), method, path, body, seconds, clients).result()


def _clients(
    urls: Sequence[str],
    method: str,
    path: str,
    body: dict[str, object] | None,
    seconds: float,
    clients: int,
) -> Load:
    content = None if body is None else json.dumps(body).encode()
    cpu_before = time.process_time()
    began = time.perf_counter()
    until = began + seconds

    def client(number: int) -> list[float]:
        connection = http.client.HTTPConnection(urlsplit(urls[number % len(urls)]).netloc, timeout=30)
        taken = []
        while (sent_at := time.perf_counter()) < until:
            connection.request(method, path.format(client=number), content, HEADERS)
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
