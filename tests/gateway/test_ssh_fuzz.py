"""Invalid SSH packets at each stage of a connection: before, during and after the login.

Most messages are valid but for one change, so that they get past the first checks. The seed decides all.
"""

import contextlib
import os
import random
from collections.abc import Callable, Iterator

import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.gateway.conftest import HOST
from tests.gateway.ssh_packets import PacketClient, blob, kexinit, string, uint32, userauth
from tests.testbed.waiting import wait_until
from tests.walk.product import GatewayProcess, ServerProcess

# With 10,000 for each stage it takes two minutes: MOORING_TEST_CLIENTS=10000
CLIENTS = int(os.environ.get("MOORING_TEST_CLIENTS", "300"))
SEED = int(os.environ.get("MOORING_TEST_SEED", "7"))
MIB = 1024 * 1024
MESSAGES, VARIABLES, SUBSYSTEMS = 100_000, 1000, 60
NUMBERS = (0, 1, 255, 35_000, 2**31 - 1, 2**31, 2**32 - 1)
TEXTS = (b"", b"\0", b"\xff\xfe", b"none", b"ssh-rsa", b"a" * 1000, b"../..", b"%s%n", "ä\n\x1b[2J".encode())

OPEN_SESSION = bytes([90]) + string(b"session") + bytes(4) + uint32(2**21) + uint32(32_768)
CHANNEL_OPENED, CHANNEL_REFUSED, CHANNEL_CLOSE, CHANNEL_SUCCESS, CHANNEL_FAILURE = 91, 92, 97, 99, 100

Stage = Callable[[PacketClient, random.Random], None]


def changed(message: bytes, rng: random.Random) -> bytes:
    """The message with one change, or none."""
    at = rng.randrange(len(message))
    match rng.randrange(8):
        case 0:
            return message[:at]
        case 1:
            return message[:at] + bytes([message[at] ^ 1 << rng.randrange(8)]) + message[at + 1 :]
        case 2:  # often a length
            return message[:at] + uint32(rng.choice(NUMBERS)) + message[at + 4 :]
        case 3:
            return message + rng.randbytes(rng.randrange(64))
        case 4:
            return message[:at] + string(rng.choice(TEXTS)) + message[at:]
        case 5:
            return bytes([rng.randrange(256)]) + message[1:]
        case 6:
            return message[:1] + rng.randbytes(rng.randrange(200))
    return message


def unencrypted(rng: random.Random) -> bytes:
    """A message of the key exchange or the transport."""
    point = rng.choice([bytes(32), b"\xff" * 32, rng.randbytes(32), rng.randbytes(rng.randrange(70))])
    return rng.choice(
        [
            kexinit(), bytes([30]) + string(point), bytes([21]), bytes([2]) + string(b"ignore"),
            bytes([1]) + uint32(rng.choice(NUMBERS)) + string(b"bye") + string(b""),
            bytes([3]) + uint32(rng.choice(NUMBERS)), bytes([4, 1]) + string(rng.choice(TEXTS)) + string(b""),
            bytes([7]) + uint32(rng.choice(NUMBERS)) + string(b"server-sig-algs") + string(b"x"),
        ]
    )  # fmt: skip


def of_login(rng: random.Random) -> bytes:
    """A message of a client that has exchanged keys."""
    key = blob(Ed25519PrivateKey.from_private_bytes(rng.randbytes(32)))
    user = rng.choice(["x", "", "ins_x", "a.b.c", "ä" * 300])
    kind = rng.choice(["ssh-ed25519", "rsa-sha2-256", "sk-ssh-ed25519@openssh.com", "ecdsa-sha2-nistp521"])
    certificate = "ssh-ed25519-cert-v01@openssh.com"
    signature = string(string(kind.encode()) + string(rng.randbytes(64)))
    offered = userauth(user, b"publickey") + b"%c" + string(kind.encode()) + string(key)
    return rng.choice(
        [
            bytes([5]) + string(rng.choice([b"ssh-userauth", b"ssh-connection", *TEXTS])),
            userauth(user, b"none"), userauth(user, b"password") + b"\0" + string(rng.choice(TEXTS)),
            userauth(user, b"keyboard-interactive") + string(b"") * 2,
            userauth(user, b"gssapi-with-mic") + uint32(rng.choice(NUMBERS)),
            userauth(user, b"hostbased") + string(kind.encode()) + string(key) + string(b"h") + string(b"u"),
            offered.replace(b"%c", b"\0"), offered.replace(b"%c", b"\1") + signature,
            userauth(user, b"publickey") + b"\1" + string(certificate.encode())
            + string(string(certificate.encode()) + string(rng.randbytes(32)) + key[19:] + bytes(8)
                     + uint32(rng.choice(NUMBERS)) + string(b"id") + string(string(b"key_x")) + bytes(36))
            + signature,
            bytes([61]) + uint32(rng.choice(NUMBERS)) + string(b"answer"),
            of_channels(rng), unencrypted(rng),
        ]
    )  # fmt: skip


def of_channels(rng: random.Random) -> bytes:
    """A message of a client that is logged in."""
    number, text, channel = (
        rng.choice(NUMBERS),
        rng.choice(TEXTS),
        uint32(rng.choice([0, 0, 0, 1, 2**32 - 1])),
    )
    sizes = uint32(number) * 4
    kind = rng.choice(
        [b"session", b"direct-tcpip", b"direct-streamlocal@openssh.com", b"x11", b"tun@openssh.com"]
    )
    target = string(b"localhost") + uint32(rng.choice([80, *NUMBERS])) + string(b"h") + uint32(1)
    asked = rng.choice(
        [
            (b"pty-req", string(b"xterm") + sizes + string(text)), (b"env", string(b"LC_ALL") + string(text)),
            (b"shell", b""), (b"exec", string(b"true" + text)), (b"subsystem", string(b"sftp")),
            (b"subsystem", string(text)), (b"window-change", sizes), (b"signal", string(b"TERM")),
            (b"signal", string(text)), (b"break", uint32(number)), (b"exit-status", uint32(number)),
            (b"x11-req", b"\0" + string(text) * 2 + uint32(number)), (b"auth-agent-req@openssh.com", b""),
            (b"xon-xoff", b"\1"), (text, b""),
        ]
    )  # fmt: skip
    forwarding = rng.choice([b"tcpip-forward", b"cancel-tcpip-forward", b"streamlocal-forward@openssh.com"])
    return rng.choice(
        [
            bytes([80]) + string(forwarding) + b"\1" + string(b"0.0.0.0") + uint32(number),
            bytes([80]) + string(b"hostkeys-prove-00@openssh.com") + b"\1" + string(text),
            bytes([90]) + string(kind) + uint32(number) + uint32(number) + uint32(32_768) + target,
            OPEN_SESSION,
            *(bytes([98]) + channel + string(asked[0]) + b"\1" + asked[1],) * 4,
            bytes([93]) + channel + uint32(number), bytes([94]) + channel + string(text * 30),
            bytes([95]) + channel + uint32(number) + string(text),
            bytes([96]) + channel, bytes([97]) + channel, bytes([91]) + channel + sizes,
            bytes([92]) + channel + uint32(number) + string(text) * 2,
            bytes([rng.choice([81, 82, 99, 100])]) + channel,
        ]
    )  # fmt: skip


@pytest.fixture(scope="module")
def key(server: ServerProcess) -> Ed25519PrivateKey:
    """A registered key."""
    made = Ed25519PrivateKey.generate()
    line = made.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    with server.client as admin:
        assert admin.post("/v1/ssh-keys", json={"name": "k", "public_key": line}).status_code == 201
        admin.create(name="waits")  # there is no node
    return made


@contextlib.contextmanager
def unharmed(gateway: GatewayProcess, key: Ed25519PrivateKey) -> Iterator[None]:
    """Checks that the gateway has as many files as before, has failed nowhere, and serves others."""
    for _ in range(3):
        log_in(gateway, key)  # opens what stays open
    process = psutil.Process(gateway.pid)
    files, memory, printed = process.num_fds(), process.memory_info().rss, len(gateway.printed())
    yield
    log_in(gateway, key)
    wait_until(lambda: process.num_fds() <= files + 5, 60)
    assert process.memory_info().rss < memory + 100 * MIB
    assert not gateway.printed()[printed:], gateway.tail()


@contextlib.contextmanager
def session(gateway: GatewayProcess, key: Ed25519PrivateKey) -> Iterator[PacketClient]:
    """A client with an open session."""
    with contextlib.closing(PacketClient(HOST, gateway.ssh_port)) as client:
        client.exchange_keys()
        client.log_in("waits", key)
        client.send(OPEN_SESSION)
        client.read_until(CHANNEL_OPENED)
        yield client


def log_in(gateway: GatewayProcess, key: Ed25519PrivateKey) -> None:
    with contextlib.closing(PacketClient(HOST, gateway.ssh_port)) as client:
        client.exchange_keys()
        client.log_in("waits", key)
        client.end()


def fuzz(gateway: GatewayProcess, stage: Stage) -> None:
    for number in range(CLIENTS):
        rng = random.Random(SEED * 1_000_000 + number)
        client = PacketClient(HOST, gateway.ssh_port)
        with contextlib.closing(client), contextlib.suppress(OSError, EOFError):
            stage(client, rng)
            # At the end of the input, asyncssh drops what it has not decided yet, such as a login.
            if rng.randrange(4) or client.is_quiet(0.02):
                client.end()


def send_some(client: PacketClient, rng: random.Random, message: Callable[[random.Random], bytes]) -> None:
    for _ in range(rng.randrange(1, 12)):
        client.send(changed(message(rng), rng))
    if rng.randrange(4) == 0:  # a packet of a wrong length, or with a wrong checksum
        client.send_bytes(uint32(rng.choice(NUMBERS)) + rng.randbytes(rng.randrange(64)))


def test_invalid_packets_before_the_login_harm_nobody(
    gateway: GatewayProcess, key: Ed25519PrivateKey
) -> None:
    def stage(client: PacketClient, rng: random.Random) -> None:
        client.greet()
        send_some(client, rng, unencrypted)

    with unharmed(gateway, key):
        fuzz(gateway, stage)


def test_invalid_packets_during_the_login_harm_nobody(
    gateway: GatewayProcess, key: Ed25519PrivateKey
) -> None:
    def stage(client: PacketClient, rng: random.Random) -> None:
        client.exchange_keys()
        if rng.randrange(4):
            client.send(bytes([5]) + string(b"ssh-userauth"))
        send_some(client, rng, of_login)

    with unharmed(gateway, key):
        fuzz(gateway, stage)


def test_invalid_packets_after_the_login_harm_nobody(gateway: GatewayProcess, key: Ed25519PrivateKey) -> None:
    def stage(client: PacketClient, rng: random.Random) -> None:
        client.exchange_keys()
        client.log_in("waits", key)
        if rng.randrange(4):
            client.send(OPEN_SESSION)
            client.read_until(CHANNEL_OPENED)
        send_some(client, rng, of_channels)

    with unharmed(gateway, key):
        fuzz(gateway, stage)


def resize(number: int) -> bytes:
    return string(b"window-change") + b"\0" + uint32(80 + number % 100) * 4


def signalled(number: int) -> bytes:
    return string(b"signal") + b"\0" + string([b"USR1", b"USR2", f"X{number}".encode()][number % 3])


@pytest.mark.parametrize("request_of", [resize, signalled])
def test_messages_that_need_no_room_in_the_window_fill_no_memory(
    gateway: GatewayProcess, key: Ed25519PrivateKey, request_of: Callable[[int], bytes]
) -> None:
    process = psutil.Process(gateway.pid)
    with session(gateway, key) as client:
        begin = bytes([98]) + uint32(0)
        for number in range(MESSAGES):
            client.send(begin + request_of(number))
            if number == MESSAGES // 10:
                memory = process.memory_info().rss
        # The answer comes after all others were read.
        client.send(begin + string(b"window-change") + b"\1" + uint32(80) * 4)
        client.read_until(CHANNEL_SUCCESS)
        assert process.memory_info().rss < memory + 6 * MIB


def test_a_session_without_a_command_is_closed(gateway: GatewayProcess, key: Ed25519PrivateKey) -> None:
    with session(gateway, key) as client:
        client.read_until(CHANNEL_CLOSE)
        client.send(OPEN_SESSION)
        client.read_until(CHANNEL_OPENED)


def test_names_of_subsystems_fill_no_memory(gateway: GatewayProcess, key: Ed25519PrivateKey) -> None:
    process = psutil.Process(gateway.pid)
    with session(gateway, key) as client:
        for number in range(SUBSYSTEMS):
            if number:
                client.send(OPEN_SESSION)
                client.read_until(CHANNEL_OPENED)
            name = string(b"subsystem") + b"\1" + string(b"x" * 200_000)
            client.send(bytes([98]) + uint32(number) + name)
            client.read_until(CHANNEL_FAILURE)
            if number == 10:
                memory = process.memory_info().rss
        assert process.memory_info().rss < memory + 4 * MIB


@pytest.mark.parametrize("names", [(b"localhost", b"x" * 256), (b"x" * 256, b"localhost")])
def test_long_names_of_hosts_are_refused(
    gateway: GatewayProcess, key: Ed25519PrivateKey, names: tuple[bytes, bytes]
) -> None:
    with session(gateway, key) as client:
        sizes = uint32(1) + uint32(2**15) + uint32(2**15)
        target, origin = (string(name) + uint32(80) for name in names)
        client.send(bytes([90]) + string(b"direct-tcpip") + sizes + target + origin)
        assert b"a host name is too long" in client.read_until(CHANNEL_REFUSED)


def test_long_names_of_terminals_are_refused(gateway: GatewayProcess, key: Ed25519PrivateKey) -> None:
    with session(gateway, key) as client:
        for name, answer in ((b"x" * 65, CHANNEL_FAILURE), (b"xterm-256color", CHANNEL_SUCCESS)):
            size = uint32(80) * 4
            client.send(
                bytes([98]) + uint32(0) + string(b"pty-req") + b"\1" + string(name) + size + string(b"")
            )
            client.read_until(answer)


def test_variables_of_a_session_fill_no_memory(gateway: GatewayProcess, key: Ed25519PrivateKey) -> None:
    process = psutil.Process(gateway.pid)
    with session(gateway, key) as client:
        memory = process.memory_info().rss
        variable = bytes([98]) + uint32(0) + string(b"env")
        for number in range(VARIABLES):
            name, size = allowed_name(number), 4000 if number % 2 else 30_000
            client.send(variable + b"\0" + string(name) + string(b"v" * size))
        client.send(variable + b"\1" + string(b"LANG") + string(b"C"))
        client.read_until(CHANNEL_SUCCESS)
        assert process.memory_info().rss < memory + 6 * MIB


def allowed_name(number: int) -> bytes:
    """A name that the gateway allows."""
    letters = "".join(chr(ord("A") + int(digit)) for digit in str(number))
    return f"LC_{letters}".encode()
