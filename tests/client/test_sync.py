"""What the scripts make from the asynchronous client is what is committed."""

import pytest
from scripts import generate_operations, generate_sync


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return {path.as_posix(): text for path, text in generate_sync.generated().items()}


def test_the_committed_files_are_the_generated_ones(generated: dict[str, str]) -> None:
    """If this fails: `make client`."""
    assert len(generated) > 15
    committed = {
        path.relative_to(generate_sync.TARGET).as_posix(): path.read_text()
        for path in generate_sync.TARGET.rglob("*.py")
        if len(path.relative_to(generate_sync.TARGET).parts) > 1 or path.name not in generate_sync.BY_HAND
    }
    assert committed == generated


def test_nothing_asynchronous_is_left(generated: dict[str, str]) -> None:
    for name, text in generated.items():
        assert "async" not in text.replace("websockets.asyncio", ""), name
        assert "await" not in text, name


def test_the_committed_operations_are_the_generated_ones() -> None:
    """If this fails: `make client`."""
    assert generate_operations.TARGET.read_text() == generate_operations.generated()
