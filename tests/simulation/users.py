"""Users who create, stop, start, restart and delete instances, and repeat requests without an answer."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session
from starlette.responses import Response

from mooring.api.context import Context
from mooring.api.http import transactions
from mooring.api.http.transactions import BatchedRequest, Call
from mooring.api.routes import instances as instance_routes
from mooring.control.idempotency import StoredAnswer
from mooring.control.instances import instances
from mooring.control.tenants import projects
from mooring.core.access import Access, Caller, Permission
from mooring.db import failures
from mooring.db.tables import Instance
from mooring_client.errors import MooringError
from mooring_client.schemas.instances import InstanceCreate
from tests.simulation.network import Link, NoAnswer, call
from tests.simulation.replicas import Replica
from tests.simulation.virtual import Killed, hub

if TYPE_CHECKING:
    from tests.simulation.world import World

_CALLER = Caller("key_simulation", "key", "simulation", everywhere=frozenset({Permission.ADMIN}))
_COMMANDS: tuple[list[str] | None, ...] = (None, None, None, ["sleep", "20"], ["sh", "-c", "sleep 5; exit 3"])
# Statuses after which the same request is sent again.
_TRANSIENT = {409, 429, 503}
Act = Callable[[Context, Access, Session], Instance]


class User:
    """One user with one request at a time."""

    def __init__(self, world: "World", number: int) -> None:
        self._world, self._number = world, number
        self._made = 0
        self._own: list[str] = []
        self._link = Link(loss=0.02)

    def run(self) -> None:
        """Act until the users of the world end."""
        while self._world.users_act:
            hub().sleep(hub().random.expovariate(0.6))
            if not self._own or hub().random.random() < 0.4:
                self._create()
            else:
                self._change(hub().random.choice(self._own))

    def _create(self) -> None:
        self._made += 1
        name = f"user{self._number}-{self._made}"
        body = self._body(name)

        def act(context: Context, access: Access, session: Session) -> Instance:
            default = context.identity.default_project_id
            project = projects.for_new(session, access, body.project_id, default)
            return instances.create(session, access, project, body)

        self._world.history.unknown.add(name)
        answer = self._until_answered("instance.create", name, act, status=201)
        if answer is None:
            return
        instance = answer.headers["Location"].rpartition("/")[2]
        self._world.history.creates[name].add(instance)
        self._own.append(instance)

    def _body(self, name: str) -> InstanceCreate:
        random = hub().random
        fields: dict[str, Any] = {
            "name": name,
            "image": random.choice(["a", "b", "c-missing"] if random.random() < 0.1 else ["a", "b"]),
            "gpus": {"count": random.choice([0, 1, 1, 2, 2, 4])},
            "command": random.choice(_COMMANDS),
            "restart": random.choice(["never", "never", "on_failure", "always"]),
            "on_node_loss": random.choice(["keep", "replace"]),
            "preemptible": random.random() < 0.2,
            "priority": random.choice([40, 50, 50, 60]),
        }
        if random.random() < 0.15:
            fields["max_duration_s"] = random.choice([60, 90])
        if random.random() < 0.25:
            fields["volumes"] = [{"volume": f"data-{random.randrange(3)}", "path": "/data"}]
        if random.random() < 0.5:
            fields["project_id"] = self._world.limited_project
        return InstanceCreate.model_validate(
            {key: value for key, value in fields.items() if value is not None}
        )

    def _change(self, instance: str) -> None:
        operation = hub().random.choice(["stop", "start", "restart", "delete", "delete"])
        timeout_s = hub().random.choice([0, 2, 10])

        def act(_context: Context, access: Access, session: Session) -> Instance:
            match operation:
                case "stop":
                    return instances.stop(session, access, instance, timeout_s, instance_routes.BY_USER)
                case "start":
                    return instances.start(session, access, instance)
                case "restart":
                    return instances.restart(session, access, instance)
            return instances.delete(session, access, instance, None)

        key = f"{operation}-{instance}-{hub().random.randrange(10**9)}"
        answer = self._until_answered(f"instance.{operation}", key, act, status=202)
        if operation == "delete":
            # Without an answer it is unknown whether the delete took effect.
            if answer is not None:
                self._world.history.deletes.add(instance)
                self._own.remove(instance)
            else:
                self._world.unsure_deletes.add(instance)

    def _until_answered(self, action: str, key: str, act: Act, *, status: int) -> Response | None:
        """Repeat a request with its Idempotency-Key. None: it was rejected, or the users have ended."""
        for _ in range(40):
            try:
                answer = call(
                    self._world, self._link, lambda replica: _served(replica, action, key, act, status), 10
                )
            except NoAnswer:
                hub().sleep(0.2 + hub().random.random())
                continue
            if isinstance(answer, Response):
                return answer
            if answer not in _TRANSIENT or not self._world.users_act:
                return None
            hub().sleep(0.5 + hub().random.random())
        return None


def _served(replica: Replica, action: str, key: str, act: Act, status: int) -> Response | int:
    """Run an operation on a replica, as its endpoint does. Returns the status of an error."""
    context = replica.context
    if context is None:
        raise Killed
    access = Access(_CALLER, Permission.WRITE, action)
    request = Call(access, key, context.encryptor.fingerprint(key.encode()))

    def operation(session: Session) -> StoredAnswer:
        row = act(context, access, session)
        return instance_routes.answer_of(context, session, row, status)

    try:
        if status == 201:
            (result,) = transactions.run_batch(context, [BatchedRequest(request, operation)])
            if isinstance(result, Exception):
                raise result
            return result
        return transactions.idempotent(context, request, operation)
    except MooringError as error:
        return error.status
    except failures.DATABASE_ERRORS as error:
        if not failures.is_unavailable(error):
            raise
        return 503
