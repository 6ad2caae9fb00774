"""Where a client finds the URL and the API key."""

from pathlib import Path

import pytest

from mooring_client.endpoint import checked_url, config_file, read_config, resolve
from mooring_client.failures import NotConfigured

CONFIG = """
current = "lab"

[contexts.lab]
url = "https://lab.example"
api_key = "lab-key"
project = "vision"

[contexts.home]
url = "http://127.0.0.1:8700/"
api_key = "home-key"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    environment = {"HOME": str(tmp_path)}
    file = config_file(environment)
    file.parent.mkdir(parents=True)
    file.write_text(CONFIG)
    return environment


def _found(environment: dict[str, str], **arguments: str) -> tuple[str, str, str | None]:
    endpoint = resolve(**arguments, environment=environment)
    return endpoint.url, endpoint.api_key, endpoint.project


def test_the_current_context_is_used(environment: dict[str, str]) -> None:
    assert _found(environment) == ("https://lab.example", "lab-key", "vision")


def test_a_context_can_be_named(environment: dict[str, str]) -> None:
    expected = ("http://127.0.0.1:8700", "home-key", None)
    assert _found(environment, context="home") == expected
    assert _found({**environment, "MOORING_CONTEXT": "home", "MOORING_API_KEY": "other"}) == expected


def test_the_environment_comes_before_the_current_context(environment: dict[str, str]) -> None:
    given = {"MOORING_URL": "https://ci.example", "MOORING_API_KEY": "ci-key", "MOORING_PROJECT": "ci"}
    assert _found({**environment, **given}) == ("https://ci.example", "ci-key", "ci")


def test_arguments_come_first(environment: dict[str, str]) -> None:
    given = {**environment, "MOORING_URL": "https://ci.example", "MOORING_API_KEY": "ci-key"}
    assert _found(given, url="https://a.example", api_key="k")[:2] == ("https://a.example", "k")


def test_the_key_of_a_context_is_not_sent_to_another_url(environment: dict[str, str]) -> None:
    with pytest.raises(NotConfigured, match=r"there is no API key for https://evil\.example"):
        resolve(environment={**environment, "MOORING_URL": "https://evil.example"})
    with pytest.raises(NotConfigured, match=r"there is no API key for https://evil\.example"):
        resolve("https://evil.example", environment=environment)
    with pytest.raises(NotConfigured, match="not both"):
        resolve("https://evil.example", context="lab", environment=environment)


def test_another_key_can_be_used_with_the_current_context(environment: dict[str, str]) -> None:
    assert _found({**environment, "MOORING_API_KEY": "other"})[:2] == ("https://lab.example", "other")


def test_without_a_url_it_is_this_machine(tmp_path: Path) -> None:
    assert _found({"HOME": str(tmp_path)}, api_key="k") == ("http://127.0.0.1:8700", "k", None)


def test_a_missing_key_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotConfigured, match="run `mooring login`, or set MOORING_URL and MOORING_API_KEY"):
        resolve(environment={"HOME": str(tmp_path)})


def test_an_unknown_context_names_the_known_ones(environment: dict[str, str]) -> None:
    with pytest.raises(NotConfigured, match=r"there is no context 'work' \(known: home, lab\)"):
        resolve(context="work", environment=environment)


@pytest.mark.parametrize(
    "text", ["current =", "contexts = 1", "[contexts]\na = 1", b"\xff".decode("latin-1")]
)
def test_a_damaged_file_is_named(environment: dict[str, str], text: str) -> None:
    config_file(environment).write_text(text)
    with pytest.raises(NotConfigured, match=r"config\.toml"):
        read_config(config_file(environment))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://gpu.example:8700", "would send your API key unencrypted"),
        ("http://127.0.0.1.evil.example", "would send your API key unencrypted"),
        ("ftp://gpu.example", "is not a URL of a server"),
        ("gpu.example", "is not a URL of a server"),
        ("https://user:secret@gpu.example", "is not a URL of a server"),
        ("https://gpu.example?x=1", "is not a URL of a server"),
        ("https://gpu.example:x", "is not a URL"),
    ],
)
def test_urls_that_are_not_allowed(url: str, message: str) -> None:
    with pytest.raises(NotConfigured, match=message):
        checked_url(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://localhost", "http://[::1]:8700", "https://a.example/mooring"]
)
def test_urls_that_are_allowed(url: str) -> None:
    assert checked_url(f"{url}/") == url


def test_plain_http_can_be_allowed() -> None:
    assert checked_url("http://10.0.0.7:8700", insecure=True) == "http://10.0.0.7:8700"


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(resolve("https://a.example", "secret", environment={}))
