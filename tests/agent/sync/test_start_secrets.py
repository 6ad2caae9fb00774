"""The secrets of an attempt are fetched at its start, and cached in memory for retries."""

from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from mooring.agent.runtime import StartDelayed, StartRefused
from mooring.agent.sync.client import ControlPlaneClient
from mooring.agent.sync.identity import NodeIdentity
from mooring.agent.sync.start_secrets import CACHE_S, StartSecretsCache
from mooring.schemas.agent import RegistryAuth, StartSecrets
from tests.agent.builders import assignment as an_assignment
from tests.agent.control_planes import CREDENTIAL, TinyControlPlane, control_plane

GIVEN = StartSecrets(
    secrets={"TOKEN": "swordfish"},
    registry=RegistryAuth(server="registry.example", username="ci", password="marlin"),
)
WANTED = an_assignment(instance_id="ins_1").model_copy(update={"asks_for_secrets": True})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def plane() -> Iterator[TinyControlPlane]:
    with control_plane(secrets=GIVEN) as made:
        yield made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def secrets(plane: TinyControlPlane, clock: Clock) -> Iterator[StartSecretsCache]:
    client = ControlPlaneClient(plane.url)
    identity = NodeIdentity(
        node_id="nod_1", node_name="n", credential=SecretStr(CREDENTIAL), control_plane_id="cpl_tests"
    )
    client.identify(identity)
    yield StartSecretsCache(client, lambda: 7, clock)
    client.close()


def test_a_request_has_the_attempt_and_the_session(
    plane: TinyControlPlane, secrets: StartSecretsCache
) -> None:
    equipped = secrets.equip(WANTED)
    assert (equipped.secrets, equipped.registry) == (GIVEN.secrets, GIVEN.registry)
    ((path, request),) = plane.secrets_requests
    assert path == "/agent/v1/instances/ins_1/start-secrets"
    assert (request.attempt, request.session) == (WANTED.attempt, 7)


def test_no_request_is_sent_for_an_assignment_without_secrets(
    plane: TinyControlPlane, secrets: StartSecretsCache
) -> None:
    plain = WANTED.model_copy(update={"asks_for_secrets": False})
    assert secrets.equip(plain) is plain
    assert plane.secrets_requests == []


def test_a_retry_requests_secrets_again_only_when_the_cached_ones_expired_or_were_forgotten(
    plane: TinyControlPlane, secrets: StartSecretsCache, clock: Clock
) -> None:
    for _ in range(3):
        secrets.equip(WANTED)
    assert len(plane.secrets_requests) == 1
    clock.now = CACHE_S
    secrets.equip(WANTED)
    assert len(plane.secrets_requests) == 2
    secrets.forget((WANTED.instance_id, WANTED.attempt))
    secrets.equip(WANTED)
    assert len(plane.secrets_requests) == 3


def test_a_rejection_ends_the_start_and_an_outage_delays_it(
    plane: TinyControlPlane, secrets: StartSecretsCache
) -> None:
    plane.failure = (503, "unavailable")
    with pytest.raises(StartDelayed) as delayed:
        secrets.equip(WANTED)
    assert delayed.value.reason.code == "waiting_for_secrets"
    plane.failure, plane.secrets = None, None
    with pytest.raises(StartRefused) as refused:
        secrets.equip(WANTED)
    assert refused.value.reason.code == "secrets_refused"
