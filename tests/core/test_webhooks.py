"""Webhooks without network: URLs, signatures, times of attempts, and which events match."""

import base64
import json
from typing import get_args

import pytest
from standardwebhooks import Webhook as Verifier

from mooring.control.events import EventKind
from mooring.core import notice_texts, webhooks
from mooring.core.webhooks import AddressRules, parse_networks, parse_target
from mooring_client.schemas.webhooks import WebhookEvent

SECRETS = [webhooks.new_secret(bytes([number]) * 32) for number in range(2)]


def test_every_event_can_be_subscribed_to() -> None:
    assert {*get_args(WebhookEvent)} == {*map(str, EventKind), "notices"}


def test_each_secret_verifies_a_signature() -> None:
    body = b'{"type":"x"}'
    timestamp = 1_700_000_000
    signature = webhooks.signature(SECRETS, "evt_1", timestamp, body)
    signed = [each.removeprefix("v1,") for each in signature.split()]
    assert len(signed) == 2
    for secret, each in zip(SECRETS, signed, strict=True):
        assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
        assert len(base64.b64decode(each)) == 32
        assert Verifier(secret) is not None


@pytest.mark.parametrize(
    ("url", "origin", "path"),
    [
        ("https://receiver.example", "https://receiver.example", "/"),
        ("https://Receiver.Example.:8443/a/b?c=d", "https://receiver.example:8443", "/a/b?c=d"),
        ("https://receiver.example:443/", "https://receiver.example", "/"),
        ("http://[::1]:80/x", "http://[::1]", "/x"),
        ("https://[2001:db8::1]:8443/", "https://[2001:db8::1]:8443", "/"),
    ],
)
def test_targets_of_urls(url: str, origin: str, path: str) -> None:
    target = parse_target(url)
    assert (target.origin, target.path) == (origin, path)
    assert webhooks.shown_url(url) == f"{origin}/…"


@pytest.mark.parametrize(
    "url",
    [
        "https://", "https:///path", "https://user:password@receiver.example/", "https://receiver.example/#x",
        "https://receiver.example:0/", "https://receiver.example:99999/", "https://receiver.example:x/",
        "ftp://receiver.example/", "https://[::1/",
    ],
)  # fmt: skip
def test_other_urls_are_rejected(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_target(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://receiver.example/", "https://127.0.0.1/", "https://127.1/", "https://0x7f000001/",
        "https://2130706433/", "https://[::ffff:127.0.0.1]/", "https://169.254.169.254/", "https://[::1]/",
    ],
)  # fmt: skip
def test_what_is_known_to_be_internal_is_rejected_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        AddressRules().require(parse_target(url))


def test_listed_networks_are_allowed_without_tls_too() -> None:
    rules = AddressRules(parse_networks("127.0.0.0/8, ::1/128"))
    for url in ("http://127.0.0.1/", "https://127.0.0.1/", "http://[::1]/", "http://receiver.example/"):
        rules.require(parse_target(url))
    with pytest.raises(ValueError, match="not allowed"):
        rules.require(parse_target("http://10.0.0.1/"))


def test_the_schedule_of_attempts() -> None:
    pauses = [webhooks.pause_s(webhooks.SCHEDULE, attempts, None, 0.0) for attempts in range(11)]
    assert pauses == [0, 5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400, None]
    assert webhooks.pause_s(webhooks.SCHEDULE, 1, None, 1.0) == 6
    assert webhooks.pause_s(webhooks.SCHEDULE, 1, 60.0, 0.0) == 60
    assert webhooks.pause_s(webhooks.SCHEDULE, 2, 60.0, 0.0) == 300
    assert webhooks.pause_s(webhooks.SCHEDULE, 1, 10.0**9, 0.0) == 86_400


def test_a_large_body_has_the_ids_only() -> None:
    body = webhooks.body_of("node.lost", "now", {"node_id": "nod_1", "instances": ["i" * 30] * 1000})
    assert json.loads(body)["data"] == {"node_id": "nod_1", "truncated": True}
    assert len(webhooks.body_of("x", "now", {"text": "x" * 19_000})) > 19_000


@pytest.mark.parametrize(
    ("kind", "data", "is_notice"),
    [
        ("instance.state_changed", {"to": "failed"}, True),
        ("instance.state_changed", {"to": "succeeded"}, True),
        ("instance.state_changed", {"to": "unreachable"}, True),
        ("instance.state_changed", {"to": "running"}, False),
        ("instance.expiring", {}, True),
        ("project.quota_nearly_used", {}, True),
        ("node.lost", {}, True),
        ("node.state_changed", {"state": "unreachable"}, True),
        ("node.state_changed", {"state": "ready"}, False),
        ("gpu.health_changed", {"to": "quarantined"}, True),
        ("gpu.health_changed", {"to": "healthy"}, False),
        ("gpu.claimed", {}, False),
    ],
)
def test_which_events_are_notices(kind: str, data: dict[str, str], *, is_notice: bool) -> None:
    assert webhooks.is_wanted(["notices"], kind, data) is is_notice
    assert webhooks.is_wanted([kind], kind, data)


def test_texts_for_chats_mention_nobody_and_contain_no_markup() -> None:
    text = json.loads(webhooks.slack_body("<!channel> & <https://evil.example|x> @all"))["text"]
    assert text == "&lt;!channel&gt; &amp; &lt;https://evil.example|x&gt; @\u200ball"


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        (
            "instance.state_changed",
            {"to": "failed", "reason": {"code": "x", "message": "exit code 1"}},
            "Instance train in the project lab has failed: exit code 1",
        ),
        ("gpu.health_changed", {"gpu_uuid": "GPU-1", "to": "quarantined"}, "is quarantined"),
        ("node.lost", {"node_name": "gpu-7"}, "is lost"),
        (
            "instance_group.changed",
            {"group_id": "grp_1"},
            "instance_group.changed of train in",
        ),
        (
            "project.quota_nearly_used",
            {"project_name": "lab", "percent": 87, "quota": "gpus", "used": 7.0, "limit": 8.0},
            "The project lab uses 87 % of its quota gpus: 7 of 8",
        ),
    ],
)
def test_sentences(kind: str, data: dict[str, object], text: str) -> None:
    assert text in notice_texts.text_of(kind, data, "train", "lab")
