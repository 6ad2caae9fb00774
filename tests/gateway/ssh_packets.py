"""A client that writes SSH packets itself, so that it can send invalid ones at any point (RFC 4253).

It speaks one algorithm of each kind: curve25519-sha256, ssh-ed25519 and aes128-gcm@openssh.com. It does not
check the server.
"""

import hashlib
import os
import socket

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

VERSION = b"SSH-2.0-fuzz"
SERVICE_REQUEST, KEXINIT, NEWKEYS, ECDH_INIT = 5, 20, 21, 30
USERAUTH_REQUEST, USERAUTH_SUCCESS = 50, 52
WITHIN_S = 30
_BLOCK = _TAG = 16
_ALGORITHMS = (
    b"curve25519-sha256", b"ssh-ed25519", *(b"aes128-gcm@openssh.com",) * 2, *(b"hmac-sha2-256",) * 2,
    *(b"none",) * 2, *(b"",) * 2,
)  # fmt: skip


def string(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


def uint32(number: int) -> bytes:
    return number.to_bytes(4, "big")


def mpint(number: bytes) -> bytes:
    number = number.lstrip(b"\0")
    return string(b"\0" + number if number and number[0] & 0x80 else number)


def kexinit() -> bytes:
    return bytes([KEXINIT]) + os.urandom(16) + b"".join(map(string, _ALGORITHMS)) + b"\0" + uint32(0)


class Cipher:
    """AES-128-GCM in one direction (RFC 5647)."""

    def __init__(self, key: bytes, nonce: bytes) -> None:
        self._cipher, self._nonce = AESGCM(key[:16]), nonce[:12]

    def encrypted(self, length: bytes, packet: bytes) -> bytes:
        return self._cipher.encrypt(self._next(), packet, length)

    def decrypted(self, length: bytes, packet: bytes) -> bytes:
        return self._cipher.decrypt(self._next(), packet, length)

    def _next(self) -> bytes:
        nonce = self._nonce
        counter = int.from_bytes(nonce[4:], "big") + 1
        self._nonce = nonce[:4] + counter.to_bytes(8, "big")
        return nonce


class PacketClient:
    """One connection, which has sent nothing yet."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = socket.create_connection((host, port), timeout=WITHIN_S)
        self._reader = self._connection.makefile("rb")
        self._sending: Cipher | None = None
        self._receiving: Cipher | None = None
        self._session_id = b""

    def close(self) -> None:
        self._reader.close()
        self._connection.close()

    def send_bytes(self, data: bytes) -> None:
        self._connection.sendall(data)

    def send(self, payload: bytes) -> None:
        """Send one packet, encrypted after the key exchange."""
        covered = 1 if self._sending else 5  # the length field is not encrypted
        padding = _BLOCK - (covered + len(payload)) % _BLOCK
        padding += _BLOCK if padding < 4 else 0
        body = bytes([padding]) + payload + bytes(padding)
        length = uint32(len(body))
        if self._sending is not None:
            body = self._sending.encrypted(length, body)
        self.send_bytes(length + body)

    def end(self) -> None:
        """Send no more, and read until the server closes the connection, so that it has read everything.

        Raises:
            OSError: the server has closed it before.
        """
        self._connection.shutdown(socket.SHUT_WR)
        while self._reader.read(65_536):
            pass

    def greet(self) -> bytes:
        """Exchange versions. Returns the server's."""
        self.send_bytes(VERSION + b"\r\n")
        return self._reader.readline().rstrip(b"\r\n")

    def read(self) -> bytes:
        """The payload of the next packet. Raises EOFError: the connection has ended."""
        length = self._reader.read(4)
        size = int.from_bytes(length, "big")
        packet = self._reader.read(size + (_TAG if self._receiving else 0))
        if not packet:
            raise EOFError
        if self._receiving is not None:
            packet = self._receiving.decrypted(length, packet)
        return packet[1 : size - packet[0]]

    def read_until(self, number: int) -> bytes:
        """Read until there is a message of this number, and return it. Raises EOFError, as `read`."""
        while (message := self.read())[0] != number:
            pass
        return message

    def is_quiet(self, after_s: float) -> bool:
        """Whether the server has sent nothing for a while; False: it has closed the connection."""
        self._connection.settimeout(after_s)
        try:
            while self._connection.recv(65_536):
                pass
        except TimeoutError:
            self._connection.settimeout(WITHIN_S)
            return True
        return False

    def exchange_keys(self) -> None:
        """Exchange versions and keys. Afterwards packets are encrypted."""
        versions = string(VERSION) + string(self.greet())
        own, key = kexinit(), X25519PrivateKey.generate()
        public = key.public_key().public_bytes_raw()
        self.send(own)
        theirs = self.read()
        self.send(bytes([ECDH_INIT]) + string(public))
        host_key, point, _signature = _strings(self.read()[1:], 3)
        secret = mpint(key.exchange(X25519PublicKey.from_public_bytes(point)))
        hashed = versions + string(own) + string(theirs) + string(host_key) + string(public) + string(point)
        self._session_id = hashlib.sha256(hashed + secret).digest()
        self.send(bytes([NEWKEYS]))
        assert self.read()[0] == NEWKEYS
        start = secret + self._session_id
        self._sending, self._receiving = (
            Cipher(*(hashlib.sha256(start + letter + self._session_id).digest() for letter in letters))
            for letters in ((b"C", b"A"), (b"D", b"B"))
        )

    def log_in(self, user: str, key: Ed25519PrivateKey) -> None:
        """Authenticate."""
        self.send(bytes([SERVICE_REQUEST]) + string(b"ssh-userauth"))
        request = userauth(user, b"publickey") + b"\1" + string(b"ssh-ed25519") + string(blob(key))
        signature = key.sign(string(self._session_id) + request)
        self.send(request + string(string(b"ssh-ed25519") + string(signature)))
        self.read_until(USERAUTH_SUCCESS)


def userauth(user: str, method: bytes) -> bytes:
    return bytes([USERAUTH_REQUEST]) + string(user.encode()) + string(b"ssh-connection") + string(method)


def blob(key: Ed25519PrivateKey) -> bytes:
    return string(b"ssh-ed25519") + string(key.public_key().public_bytes_raw())


def _strings(data: bytes, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        length = int.from_bytes(data[:4], "big")
        found.append(data[4 : 4 + length])
        data = data[4 + length :]
    return found
