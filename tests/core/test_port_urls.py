"""Addresses of ports: what is made is read back, and nothing else means a port."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooring.core.port_urls import PortAddress, PortUrls, in_path, label, parsed_label

ID = "ins_01m8ep0zk5bak3377ahwj8qapq"
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)


@given(st.integers(1, 65_535), NAMES, NAMES)
def test_a_label_is_read_back(port: int, name: str, project: str) -> None:
    found = parsed_label(label(port, ID, name, project))
    assert found is not None
    assert found.port == port
    assert (name, project) in found.names or found.instance_id is not None


def test_all_splits_of_a_name_are_tried() -> None:
    found = parsed_label("80-a-b-c")
    assert found == PortAddress(80, None, (("a", "b-c"), ("a-b", "c")))


def test_a_long_label_names_the_id() -> None:
    made = label(65_535, ID, "a" * 63, "b" * 63)
    assert made == f"65535-{ID.replace('_', '-')}"
    assert parsed_label(made) == PortAddress(65_535, ID)


@pytest.mark.parametrize(
    "text", ["", "80", "80-", "80-a", "a-b-c", "0-a-b", "080-a-b", "65536-a-b", "80-A-b", "80-a_b-c",
             "80-a.b-c",
             "80-a-b\r\nx", "80-a-b\n", "80-" + "a" * 40 + "-" + "b" * 40, "\uff180-a-b"],
)  # fmt: skip
def test_other_labels_name_no_port(text: str) -> None:
    assert parsed_label(text) is None


@pytest.mark.parametrize(
    "path", ["/", "/p/", "/p/ins_x/80/", f"/p/{ID}/", f"/p/{ID}/0/", f"/p/{ID}/65536/", f"/p/{ID}/80x",
             f"/x/p/{ID}/80/", f"/p/{ID}/../80/", f"/p/{ID.upper()}/80/", f"/p/{ID}%2f80/"],
)  # fmt: skip
def test_other_paths_name_no_port(path: str) -> None:
    assert in_path(path) is None


def test_urls_have_the_scheme_and_port_of_the_proxy() -> None:
    domain = PortUrls("apps.example.org", "https://apps.example.org")
    assert domain.url(80, ID, "a", "b") == "https://80-a-b.apps.example.org/"
    local = PortUrls("apps.localhost", "http://apps.localhost:8721")
    assert local.url(80, ID, "a", "b") == "http://80-a-b.apps.localhost:8721/"
    paths = PortUrls("", "http://127.0.0.1:8721")
    assert paths.url(80, ID, "a", "b") == f"http://127.0.0.1:8721/p/{ID}/80/"
    assert in_path(f"/p/{ID}/80/a%2Fb/") == (PortAddress(80, ID), "/a%2Fb/")
