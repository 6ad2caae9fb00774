"""Which public keys are accepted, and how they are normalized."""

import base64
import subprocess
from pathlib import Path

import pytest

from mooring.core import ssh_public_keys
from mooring_client.errors import InvalidPublicKey

RSA_TOO_SHORT = 1024


def generated(folder: Path, *argv: str) -> str:
    file = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-C", "ada", "-f", str(file), *argv], check=True)
    return file.with_suffix(".pub").read_text()


@pytest.mark.parametrize(
    "argv",
    [
        ("-t", "ed25519"),
        ("-t", "rsa", "-b", "2048"),
        ("-t", "ecdsa", "-b", "256"),
        ("-t", "ecdsa", "-b", "384"),
        ("-t", "ecdsa", "-b", "521"),
    ],
)
def test_the_keys_and_fingerprints_are_those_of_ssh_keygen(tmp_path: Path, argv: tuple[str, ...]) -> None:
    line = generated(tmp_path, *argv)
    key = ssh_public_keys.parse(line)
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", str(tmp_path / "key.pub")], capture_output=True, text=True, check=True
    )
    assert key.fingerprint == shown.stdout.split()[1]
    assert key.text == " ".join(line.split()[:2])
    assert not key.is_security_key


def test_a_security_key_is_accepted() -> None:
    parts = (b"sk-ssh-ed25519@openssh.com", bytes(range(32)), b"ssh:")
    blob = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    key = ssh_public_keys.parse(f"{parts[0].decode()} {base64.b64encode(blob).decode()} ada")
    assert key.is_security_key
    assert key.fingerprint == ssh_public_keys.fingerprint(blob)


def test_tabs_and_other_comments_do_not_change_the_key(tmp_path: Path) -> None:
    line = generated(tmp_path, "-t", "ed25519")
    kind, encoded, _comment = line.split()
    expected = ssh_public_keys.parse(line)
    for variant in (f"{kind}\t{encoded}", f"  {kind}  {encoded}  a comment with words \n"):
        assert ssh_public_keys.parse(variant).text == expected.text


def test_a_private_key_is_refused_with_what_to_do(tmp_path: Path) -> None:
    generated(tmp_path, "-t", "ed25519")
    with pytest.raises(InvalidPublicKey, match="must not leave your machine"):
        ssh_public_keys.parse((tmp_path / "key").read_text())


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("PuTTY-User-Key-File-3: ssh-ed25519\nPrivate-Lines: 1", "must not leave your machine"),
        ("---- BEGIN SSH2 PUBLIC KEY ----\nAAAA\n---- END SSH2 PUBLIC KEY ----", "ssh-keygen -i"),
        ("", "one line of a .pub file"),
        ("ssh-dss AAAAB3NzaC1kc3MAAACBAP", "one line of a .pub file"),
        ("ssh-ed25519", "damaged"),
        ("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI", "damaged"),
        ("ssh-ed25519 not*base64", "damaged"),
        ("ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAIHVUd4q", "damaged"),
    ],
)
def test_other_texts_are_refused_with_advice(line: str, advice: str) -> None:
    with pytest.raises(InvalidPublicKey, match=advice):
        ssh_public_keys.parse(line)


def test_two_keys_in_one_text_are_refused(tmp_path: Path) -> None:
    line = generated(tmp_path, "-t", "ed25519")
    with pytest.raises(InvalidPublicKey, match="one line"):
        ssh_public_keys.parse(f"{line.strip()}\n{line}")


def test_a_short_rsa_key_is_refused(tmp_path: Path) -> None:
    line = generated(tmp_path, "-t", "rsa", "-b", str(RSA_TOO_SHORT))
    with pytest.raises(InvalidPublicKey, match=f"needs 2048 bits, and this has {RSA_TOO_SHORT}"):
        ssh_public_keys.parse(line)
