"""A join whose answer is lost is repeated, by the same agent and by the next one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import httpx

from tests.nodes import join_token
from tests.service import running, settings_for
from tests.testbed.waiting import wait_until
from tests.walk.product import Program, clean_environment


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        proxy = cast(LossyProxy, self.server)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {
            name: self.headers[name] for name in ("Content-Type", "Authorization") if self.headers[name]
        }
        answer = httpx.post(proxy.target + self.path, content=body, headers=headers, timeout=70)
        if proxy.loses(self.path):
            self.close_connection = True
            return
        self.send_response(answer.status_code)
        for name in ("Content-Type",):
            self.send_header(name, answer.headers.get(name, ""))
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *_: Any) -> None:
        """Tests are quiet."""


class LossyProxy(ThreadingHTTPServer):
    """Forwards requests, and loses answers to joins: the connection closes without one."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.lost = 0
        self.to_lose = 0

    def loses(self, path: str) -> bool:
        if path != "/agent/v1/join" or self.lost >= self.to_lose:
            return False
        self.lost += 1
        return True


@contextmanager
def lossy_proxy(target: str) -> Iterator[LossyProxy]:
    with LossyProxy(target) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


def test_a_join_whose_answer_is_lost_is_repeated(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    with (
        running(settings_for(url, tmp_path / "server")) as service,
        service.client as admin,
        lossy_proxy(service.url) as proxy,
    ):
        environment = clean_environment() | {
            "MOORING_DATA_DIR": str(tmp_path / "node"),
            "MOORING_SERVER_URL": proxy.url,
            "MOORING_SIMULATE": "1x1xH100",
            "MOORING_JOIN_TOKEN": join_token(admin),
        }
        agent = Program(["agent"], environment, tmp_path / "agent.log")
        proxy.to_lose = 1_000_000
        agent.start()
        try:
            wait_until(lambda: proxy.lost >= 2, 30)
            agent.kill()
            proxy.to_lose = 0
            agent.start()
            states = [("sim-1", "ready")]
            wait_until(lambda: [(n["name"], n["state"]) for n in admin.items("/v1/nodes")] == states, 30)
        finally:
            agent.stop()
