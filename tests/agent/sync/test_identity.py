"""The agent's files: private, written atomically and durably, and used by one agent at a time."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import SecretStr

from mooring.agent.sync.identity import NodeIdentity, StateDirectory, StateError
from mooring.schemas.agent import JoinAnswer

IDENTITY = NodeIdentity.from_answer(
    JoinAnswer(node_id="nod_1", node_name="gpu-1", credential="secret-canary", control_plane_id="cpl_1"),
    SecretStr("own"),
)


def test_a_new_directory_has_no_identity_and_generation_0(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "agent")
    assert state.identity() is None
    assert state.generation() == 0


def test_a_join_is_repeated_with_the_same_credential(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path).credential_to_join()
    assert StateDirectory(tmp_path).credential_to_join() == first
    assert (tmp_path / "joining").stat().st_mode & 0o777 == 0o600
    StateDirectory(tmp_path).save_joined(IDENTITY)
    # The next join, such as to another control plane, has another credential.
    assert StateDirectory(tmp_path).credential_to_join() != first


def test_an_earlier_control_plane_answers_with_its_own_credential(tmp_path: Path) -> None:
    answer = JoinAnswer(node_id="n", node_name="n", credential="", control_plane_id="c")
    own = SecretStr("own")
    assert NodeIdentity.from_answer(answer, own).credential == own
    earlier = answer.model_copy(update={"credential": "theirs"})
    assert NodeIdentity.from_answer(earlier, own).credential == SecretStr("theirs")


def test_the_identity_and_the_generation_are_saved(tmp_path: Path) -> None:
    StateDirectory(tmp_path).save_joined(IDENTITY)
    StateDirectory(tmp_path).save_generation(41)
    again = StateDirectory(tmp_path)
    assert again.identity() == IDENTITY
    assert again.generation() == 41


def test_only_the_owner_can_read_the_credential(tmp_path: Path) -> None:
    StateDirectory(tmp_path).save_joined(IDENTITY)
    assert (tmp_path / "node.json").stat().st_mode & 0o777 == 0o600
    assert "secret-canary" not in repr(IDENTITY)


def test_a_join_forgets_the_generation_of_the_former_control_plane(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    state.save_generation(41)
    state.save_joined(IDENTITY)
    assert state.generation() == 0


@pytest.mark.parametrize("damaged", [b"", b"\0\0", b"4x"])
def test_the_number_before_replaces_a_damaged_generation(tmp_path: Path, damaged: bytes) -> None:
    for number in (40, 41):
        StateDirectory(tmp_path).save_generation(number)
    (tmp_path / "generation").write_bytes(damaged)
    assert StateDirectory(tmp_path).generation() == 40
    # An operator who removes the file makes the node accept any state (docs/operating.md, "After a restore").
    (tmp_path / "generation").unlink()
    assert StateDirectory(tmp_path).generation() == 0


def test_a_join_forgets_the_number_before(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    for number in (40, 41):
        state.save_generation(number)
    state.save_joined(IDENTITY)
    (tmp_path / "generation").write_bytes(b"")
    with pytest.raises(StateError, match="generation is damaged"):
        state.generation()


def test_a_save_returns_when_file_and_directory_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, synced, fsync = StateDirectory(tmp_path), [], os.fsync

    def spy(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    state.save_generation(1)
    assert synced == [str(tmp_path / "generation.new"), str(tmp_path)]


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDirectory(tmp_path)
    state.save_generation(1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        state.save_generation(2)
    assert StateDirectory(tmp_path).generation() == 1


@pytest.mark.parametrize("name", ["node.json", "generation"])
def test_a_damaged_file_is_named_without_its_content(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"credential": "secret-canary"')
    state = StateDirectory(tmp_path)
    read: Callable[[], object] = state.identity if name == "node.json" else state.generation
    with pytest.raises(StateError, match=f"{name} is damaged") as error:
        read()
    assert "canary" not in str(error.value)


def test_one_agent_at_a_time(tmp_path: Path) -> None:
    first, second = StateDirectory(tmp_path), StateDirectory(tmp_path)
    first.lock()
    with pytest.raises(StateError, match="another agent runs in"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_a_directory_belongs_to_one_machine(tmp_path: Path) -> None:
    first, second = tmp_path / "first-id", tmp_path / "second-id"
    first.write_text("f3a1\n")
    second.write_text("90bb\n")
    directory = tmp_path / "agent"
    for _ in range(2):
        StateDirectory(directory).require_machine(first)
    assert (directory / "machine").stat().st_mode & 0o777 == 0o600
    assert "f3a1" not in (directory / "machine").read_text()
    with pytest.raises(StateError, match=r"belongs to another machine.*delete .*/machine"):
        StateDirectory(directory).require_machine(second)
    (directory / "machine").unlink()
    StateDirectory(directory).require_machine(second)


@pytest.mark.parametrize("content", [None, "", "uninitialized\n"])
def test_a_machine_without_an_id_is_not_checked(tmp_path: Path, content: str | None) -> None:
    known, unknown = tmp_path / "known", tmp_path / "unknown"
    known.write_text("f3a1\n")
    if content is not None:
        unknown.write_text(content)
    state = StateDirectory(tmp_path / "agent")
    state.require_machine(unknown)
    assert state.read("machine") is None
    state.require_machine(known)
    state.require_machine(unknown)
