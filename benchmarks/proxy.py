"""The port proxy, compared with a bare HTTP proxy of h11 and asyncio in the same run.

    python -m benchmarks.proxy [seconds]

Both sides pass the same requests of 16 keep-alive clients to a program that answers 55 bytes: the bare proxy
to a program on loopback, the port proxy through an agent to a simulated container. Then the delay of events.
"""

import asyncio
import multiprocessing
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

import h11
import uvloop
from tests.gateway.port_proxy import HOST, running_proxy
from tests.gateway.port_proxy import Program as TenantProgram
from tests.service import Client
from tests.testbed.waiting import wait_until
from tests.walk.up import Up

from benchmarks import stack
from benchmarks.figures import percentile, verdict

CLIENTS = 16
WANTED = 1500
EVENTS = 200
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 55\r\n\r\n" + b"x" * 54 + b"\n"
READ = 65536

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def main(seconds: float) -> int:
    with ExitStack() as exits:
        bed, base = exits.enter_context(stack.workspace()), exits.enter_context(stack.folder())
        ports = [bed.take_port() for _ in range(4)]
        for target in ((_program, ports[0]), (_bare_proxy, ports[1], ports[0])):
            process = multiprocessing.Process(target=target[0], args=target[1:], daemon=True)
            process.start()
            exits.callback(process.terminate)
        up = Up(
            base / "up", ports[2], MOORING_SIMULATE="1x8xH100", MOORING_PROXY_PORT=str(ports[3]),
            MOORING_REPORT_INTERVAL_S="5", MOORING_RATE_LIMITS="off",
        )  # fmt: skip
        up.start()
        exits.callback(up.stop)
        with Client(up.url, key=up.key) as admin:
            made = admin.create(name="bench", gpus={"count": 0}, cpus=1, memory_mib=64)
            admin.wait(made["id"], "running")
        wait_until(lambda: "Ports" in up.printed(), 30)
        ours = f"/p/{made['id']}/8888/", ports[3], f"Authorization: Bearer {up.key}\r\n"
        bare = "/", ports[1], ""
        rates: tuple[list[float], list[float]] = [], []
        for number in range(7):
            for side in (0, 1) if number % 2 else (1, 0):
                rate = asyncio.run(_rate(*(ours, bare)[side], seconds if number else 1.0))
                if number:  # the first round warms both sides
                    rates[side].append(rate)
        product, direct = (sorted(side)[len(side) // 2] for side in rates)
    print(f"{product:.0f} answers/s through the port proxy, {direct:.0f} through a bare proxy")
    wanted = round(min(WANTED, 0.5 * direct))
    passed = [verdict("answers/s", product, wanted, "", at_least=True), _events()]
    return 0 if all(passed) else 1


async def _rate(path: str, port: int, fields: str, seconds: float) -> float:
    """Answers per second."""
    request = f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n{fields}\r\n".encode()
    until = time.perf_counter() + seconds
    began = time.perf_counter()
    counts = await asyncio.gather(*(_client(request, port, until) for _ in range(CLIENTS)))
    return sum(counts) / (time.perf_counter() - began)


async def _client(request: bytes, port: int, until: float) -> int:
    reader, writer = await asyncio.open_connection(HOST, port)
    count = 0
    while time.perf_counter() < until:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        count += 1
    writer.close()
    return count


def _program(port: int) -> None:
    """A program on loopback, as the simulated one: it parses with h11."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        while data := await reader.read(READ):
            connection.receive_data(data)
            while (event := connection.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
                if isinstance(event, h11.EndOfMessage):
                    answer = h11.Response(status_code=200, headers=[("Content-Length", "55")])
                    parts = (answer, h11.Data(data=b"x" * 55), h11.EndOfMessage())
                    writer.write(b"".join(connection.send(part) or b"" for part in parts))
                    connection.start_next_cycle()

    _run(serve, port)


def _bare_proxy(port: int, program: int) -> None:
    """A proxy without authentication, limits or checks: what h11 on both sides costs."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_program, to_program = await asyncio.open_connection(HOST, program)
        server, client = h11.Connection(h11.SERVER), h11.Connection(h11.CLIENT)
        while True:
            while (event := server.next_event()) is h11.NEED_DATA:
                server.receive_data(await reader.read(READ))
            if not isinstance(event, h11.Request):
                return
            to_program.write((client.send(event) or b"") + (client.send(h11.EndOfMessage()) or b""))
            server.next_event()
            pieces: list[bytes] = []
            while not isinstance(answer := client.next_event(), h11.EndOfMessage):
                if answer is h11.NEED_DATA:
                    client.receive_data(await from_program.read(READ))
                elif isinstance(answer, h11.Response | h11.Data):
                    pieces.append(server.send(answer) or b"")
            pieces.append(server.send(answer) or b"")
            writer.write(b"".join(pieces))
            await writer.drain()
            server.start_next_cycle()
            client.start_next_cycle()

    _run(serve, port)


def _run(serve: Serve, port: int) -> None:
    async def run() -> None:
        server = await asyncio.start_server(serve, HOST, port)
        await server.serve_forever()

    with suppress(KeyboardInterrupt):
        uvloop.run(run())


def _events() -> bool:
    """How long after a program has sent an event its client has it."""
    sent: list[float] = []
    with stack.workspace() as bed, stack.folder() as base, running_proxy(bed, base, "") as proxy:
        made = proxy.instance("bench")

        def serve(connection: socket.socket) -> None:
            connection.recv(READ)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            for _ in range(EVENTS):
                sent.append(time.perf_counter())
                connection.sendall(b"data: x\n\n")
                connection.recv(1)  # the client asks for the next one in the body of its request

        program: TenantProgram = proxy.program(serve)
        head = (
            f"POST /p/{made['id']}/{program.port}/ HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {EVENTS}\r\n"
        )
        head += f"Content-Length: {EVENTS}\r\nAuthorization: {proxy.admin.headers['Authorization']}\r\n\r\n"
        took = []
        with proxy.raw(head.encode()) as connection:
            received = b""
            for number in range(EVENTS):
                while received.count(b"data: x") <= number:
                    received += connection.recv(READ)
                took.append((time.perf_counter() - sent[number]) * 1e3)
                connection.sendall(b"n")
        proxy.close_programs()
    print(f"event: median {percentile(took, 0.5):.1f} ms, p95 {percentile(took, 0.95):.1f} ms")
    return verdict("first byte of an event, p95", percentile(took, 0.95), 20, " ms")


if __name__ == "__main__":
    raise SystemExit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0))
