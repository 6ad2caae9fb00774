"""One run: replicas, nodes and users with faults, then a time without faults in which all must settle."""

import errno
import hashlib
import shutil
import sqlite3
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.agent.sync.exchange import EXIT_SESSION_TAKEN
from mooring.control import bootstrap
from mooring.control.audit import audit_log, verification
from mooring.control.audit.signing_keys import AuditKeys
from mooring.control.nodes import joins, nodes
from mooring.control.tenants import projects
from mooring.control.volumes import volumes
from mooring.core.access import Access, Caller, Permission
from mooring.db import restored_events, timekeeping
from mooring.db.session import Database
from mooring.db.signals import AnyTopic, Signals
from mooring.db.tables import Event, Instance, Project
from mooring.db.tables import Node as NodeRow
from mooring_client.schemas.states import State
from mooring_client.schemas.volumes import VolumeFields
from tests.invariants import acknowledged, containers, events, ledger, settled
from tests.invariants.acknowledged import Acknowledged
from tests.invariants.containers import Container
from tests.simulation.faults import FAULTS, Fault
from tests.simulation.nodes import Node
from tests.simulation.replicas import ADMIN_KEY, KEY, Answer, Replica, settings
from tests.simulation.users import User
from tests.simulation.virtual import EPOCH, Hub, Machine, Process, use

FAULTS_END_S: Final = 20.0
SETTLE_S: Final = 60.0  # I12
_CHECK_EVERY_S: Final = 1.0
_QUOTA_GPUS: Final = 5
_SETUP = Access(Caller("sys_simulation", "system", "simulation", everywhere=frozenset({Permission.ADMIN})),
                Permission.ADMIN, "simulation.setup")  # fmt: skip


def _make_volumes(session: Session, limited: Project) -> None:
    """Volumes of the same names in both projects, for some of the users' instances."""
    default = session.scalars(select(Project).where(Project.id != limited.id)).one()
    for project in (default, limited):
        for name, driver in (("data-0", "local"), ("data-1", "local"), ("data-2", "cache")):
            volumes.create(session, _SETUP, project, name, VolumeFields.model_validate({"driver": driver}))


class World:
    """The state of a run.

    Attributes:
        violations: what was found, in order; a run ends with the first.
        log: the last things that happened.
    """

    def __init__(self, seed: int, folder: Path, template: Path, *, trace: bool = False) -> None:
        self.seed, self.folder = seed, folder
        self.hub = Hub(seed)
        use(self.hub)
        self.trace = trace
        self.log: deque[str] = deque(maxlen=100_000 if trace else 300)
        self.violations: list[str] = []
        self._digest = hashlib.sha256()
        self.history = Acknowledged()
        self.unsure_deletes: set[str] = set()
        self.database_is_frozen = False
        self.users_act = True
        self.heals = False  # dead processes are started at once, and nothing fails
        self.was_restored = False
        self.control_machine, self._outside_machine = Machine("control"), Machine("outside")
        self.processes: list[Process] = []
        self.outside = self.process("outside", self._outside_machine, self._outside_ended)
        self.settings = settings(folder)
        self._path = folder / "mooring.db"
        shutil.copy(template, self._path)
        self._backup: Path | None = None
        self._renewed_since_backup: set[str] = set()  # names of nodes
        self._checked_at = 0.0
        self.checker = Database(self.settings.resolved_database_url, Signals())
        self.replicas = [
            Replica(self, number) for number in range(1, self.hub.random.choice([1, 2, 2, 3]) + 1)
        ]
        self.nodes = [
            Node(self, number, folder / f"node-{number}")
            for number in range(1, self.hub.random.choice([2, 3, 3, 4]) + 1)
        ]
        self.loops = {"Scheduling", "NodeHealth", "Deadlines"}
        if self.hub.random.random() < 0.2:
            self.loops |= {"Groups", "ReservationRepair", "Retention", "ClockComparison", "AuditLinks"}
        self.users = [User(self, number) for number in range(1, 3)]
        self.limited_project = ""

    # --- a run

    def run(self) -> None:
        self._set_up()
        for replica in self.replicas:
            self.outside.spawn(replica.start, "start")
        for node in self.nodes:
            self.outside.spawn(node.start_agent, "start")
        for user in self.users:
            self.outside.spawn(user.run, "user")
        self.outside.spawn(self._make_faults, "faults")
        self.hub.run(FAULTS_END_S, self._observe)
        self.note("all faults end")
        self._heal()
        until = self.hub.now + SETTLE_S
        problems = ["not checked"]
        while problems and self.hub.now < until and not self.violations:
            self.hub.run(self.hub.now + 3, self._observe)
            problems = self._all_problems()
        self.violations += problems
        self.violations += self._final_problems()

    def digest(self) -> str:
        """The same for two runs in which the same things happened at the same times."""
        with self.checker.read() as session:
            for row in session.execute(select(Event.seq, Event.at, Event.data).order_by(Event.seq)):
                self._digest.update(repr(tuple(row)).encode())
        self._digest.update(str(self.hub.switches).encode())
        return self._digest.hexdigest()[:16]

    def show_events(self) -> None:
        with self.checker.read() as session:
            for row in session.execute(select(Event.at, Event.instance_id, Event.data).order_by(Event.seq)):
                print(f"{row.at.timestamp() - EPOCH:9.3f} event {row.instance_id} {row.data}")

    def close(self) -> None:
        self.hub.close(self.processes)
        self.checker.dispose()
        use(None)

    def _set_up(self) -> None:
        timekeeping.start(self.checker, self.folder)
        audit_log.sign_with(self.checker, AuditKeys([KEY]))
        with self.checker.write() as session:
            bootstrap.ensure(session, ADMIN_KEY)
            audit_log.start(session, AuditKeys([KEY]))
            limited = projects.create(session, _SETUP, "limited", {})
            limited.quotas = {"gpus": _QUOTA_GPUS}
            self.limited_project = limited.id
            _make_volumes(session, limited)
            for node in self.nodes:
                node.folder.mkdir()
                _token, node.token = joins.create_join_token(session, _SETUP, 86_400, node.name)

    def _make_faults(self) -> None:
        faults, weights = list(FAULTS), list(FAULTS.values())
        while self.hub.now < FAULTS_END_S:
            self.hub.sleep(self.hub.random.uniform(0.3, 3))
            if self.heals:
                return
            (fault,) = self.hub.random.choices(faults, weights)
            self._begin(fault)

    def _begin(self, fault: Fault) -> None:
        self.note(f"fault: {fault.__name__}")
        fault(self)

    def _heal(self) -> None:
        self.users_act, self.heals, self.database_is_frozen = False, True, False
        for node in self.nodes:
            node.link.heal()
            node.engine.is_down = node.engine.fails_after_effect = node.disk_is_full = False
            node.down_until = 0.0
        for process in self.processes:
            process.frozen_until = 0.0
            process.steps_left = None
        self.outside.spawn(self._operate, "operator")

    def _operate(self) -> None:
        """What an operator does after the restore of an older database, by docs/operating.md."""
        while self.was_restored:
            self.hub.sleep(8)
            for node in self.nodes:
                self._accept_restored(node)

    def _accept_restored(self, node: Node) -> None:
        with self.checker.read() as session:
            row = session.scalar(select(NodeRow).where(NodeRow.name == node.name))
            code = (row.problem or {}).get("code") if row else None
            orphans = [each["container_id"] for each in row.orphans] if row else []
        if code == "generation_regressed" or orphans:
            self.note(f"operator: {node.name} has {code} and {len(orphans)} orphans")
            if node.process is not None:
                node.process.kill()
            self.hub.sleep(0.1)
            for container_id in orphans:
                node.remove_container(container_id)
            node.forget_generation()

    # --- processes

    def process(self, name: str, machine: Machine, on_end: Callable[[BaseException | None], None]) -> Process:
        made = Process(self.hub, name, machine)
        made.on_end = on_end
        self.processes.append(made)
        return made

    def _outside_ended(self, failure: BaseException | None) -> None:
        if failure is not None:
            self.violation("the simulation failed: " + _described(failure))

    def on_process_end(self, name: str, failure: BaseException | None) -> None:
        self.note(f"{name} has ended")
        # With a full disk an agent cannot join: it ends, and is started again until there is room.
        if failure is not None and getattr(failure, "errno", None) != errno.ENOSPC:
            self.violation(f"a thread of {name} died: {_described(failure)}")
        if not self.outside.is_alive:
            return
        self.outside.spawn(lambda: self._restart(name), "restart")

    def _restart(self, name: str) -> None:
        """As systemd does, after a while."""
        self.hub.sleep(1 if self.heals else self.hub.random.choice([0.5, 3.0, 10.0]))
        for replica in self.replicas:
            if replica.name == name and not replica.is_up:
                replica.start()
        for node in self.nodes:
            if name == f"agent of {node.name}":
                while self.hub.now < node.down_until:
                    self.hub.sleep(1)
                if not node.is_up:
                    node.start_agent()

    def on_agent_exit(self, node: Node, exit_code: int) -> None:
        self.note(f"the agent of {node.name} exits with {exit_code}")
        if exit_code not in {0, EXIT_SESSION_TAKEN}:
            self.violation(f"the agent of {node.name} exited with {exit_code}")
        if node.process is not None:
            node.process.kill()

    def forward(self, sender: Replica, topics: Iterable[AnyTopic]) -> None:
        """Notify the other replicas, unless the notification is lost."""
        for replica in self.replicas:
            process = replica.process
            if replica is sender or process is None or not process.is_alive or self.hub.random.random() < 0.1:
                continue
            process.spawn(lambda replica=replica: replica.receive(topics), "notification")  # type: ignore[misc]

    def misdelivered(self, node: str, path: str, answer: Answer) -> Answer:
        """Rarely, a faulty proxy gives an agent the answer of another node."""
        status, body = answer
        if path == "/agent/v1/sync" and status == 200:
            other = self._last_answer
            self._last_answer = (node, answer)
            if other is not None and other[0] != node and not self.heals and self.hub.random.random() < 0.01:
                self.note(f"{node} gets an answer of {other[0]}")
                return other[1]
        return status, body

    _last_answer: tuple[str, Answer] | None = None

    # --- faults that need the database

    def request_renewal(self, node: Node) -> None:
        # A twin keeps the credential that it has copied. A restored database knows neither of a node's two
        # if the node renewed twice since the backup: it must join again (docs/operating.md).
        if self.database_is_frozen or node.has_twins or node.name in self._renewed_since_backup:
            return
        with self.checker.write() as session:
            row = session.scalar(select(NodeRow).where(NodeRow.name == node.name))
            if row is not None:
                nodes.request_renewal(session, _SETUP, row.id)
                if self._backup is not None:
                    self._renewed_since_backup.add(node.name)

    def start_twin(self, node: Node) -> None:
        """An operator starts a second agent with the same files; the first must end and do nothing more."""
        if node.has_twins and (node.folder / "node.json").exists():
            twin = node.twin()
            twin.process = self.process(f"twin of {node.name}", node.machine, lambda _failure: None)
            twin.process.spawn(twin._run_agent, "main")

            def end() -> None:
                self.hub.sleep(10)
                if twin.process is not None:
                    twin.process.kill()

            self.outside.spawn(end, "end of the twin")

    def restore_database(self) -> None:
        """Back up now, or restore what was backed up some time ago."""
        have_joined = all((node.folder / "node.json").exists() for node in self.nodes)
        if not have_joined:
            return
        if self._backup is None:
            self._backup = self.folder / "backup.db"
            self._copy(self._path, self._backup)
            with self.checker.read() as session:
                in_progress = session.scalars(select(NodeRow.name).where(NodeRow.renewal_due))
                self._renewed_since_backup = set(in_progress)
            self.note("backup")
            return
        self.note("restore")
        for replica in self.replicas:
            if replica.process is not None:
                replica.process.kill()
        self.hub.sleep(0.1)
        self.checker.dispose()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        shutil.copy(self._backup, self._path)
        with closing(sqlite3.connect(self._path)) as connection:
            restored_events.skip_seqs(connection)
        self.checker = Database(self.settings.resolved_database_url, Signals())
        audit_log.sign_with(self.checker, AuditKeys([KEY]))
        self.was_restored, self._backup = True, None
        self._renewed_since_backup.clear()
        self._forget_what_was_lost()

    def _copy(self, source: Path, target: Path) -> None:
        target.unlink(missing_ok=True)
        with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(target)) as other:
            one.backup(other)

    def _forget_what_was_lost(self) -> None:
        with self.checker.read() as session:
            desired = dict(session.execute(select(Instance.id, Instance.desired_state)).all())
        for ids in self.history.creates.values():
            self.history.lost |= ids - desired.keys()
            ids.intersection_update(desired.keys())
        self.history.deletes = {one for one in self.history.deletes if desired.get(one) == "deleted"}

    # --- checks

    def note(self, text: str) -> None:
        line = f"{self.hub.now:9.3f} {text}"
        self._digest.update(line.encode())
        self.log.append(line)
        if self.trace:
            print(line)

    def violation(self, text: str) -> None:
        self.note(f"VIOLATION {text}")
        self.violations.append(text)

    def _observe(self) -> None:
        if self.hub.now < self._checked_at + _CHECK_EVERY_S:
            return
        self._checked_at = self.hub.now
        found = self._containers()
        for text in containers.violations(self._accountable(found)):
            self.violation(text)
        if not self.was_restored:
            with self.checker.read() as session:
                for text in containers.unallocated(found, containers.uses(session)):
                    self.violation(text)

    def _containers(self) -> list[Container]:
        return [each for node in self.nodes for each in node.containers()]

    def _accountable(self, found: list[Container]) -> list[Container]:
        """Without those of nodes whose agent could not stop them in time, or of a lost history."""
        excused = {node.name for node in self.nodes if self.hub.now < node.excused_until}
        if self.was_restored and not self.heals:
            return []
        return [each for each in found if each.node not in excused]

    def _all_problems(self) -> list[str]:
        with self.checker.read() as session:
            rows = session.execute(
                select(Instance.id, Instance.reason).where(Instance.state == State.STARTING)
            )
            # By their users' policy, some of them for ever.
            restarting = {row.id for row in rows if (row.reason or {}).get("code") == "restarting"}
            found = settled.violations(session, self._containers())
            unsettled = [text for text in found if not any(each in text for each in restarting)]
            return [*self._database_problems(session), *unsettled, *settled.unready_nodes(session)]

    def _database_problems(self, session: Session) -> list[str]:
        history = self.history
        unsure = {one for one in self.unsure_deletes if one not in history.deletes}
        known = Acknowledged(
            {name: ids - unsure for name, ids in history.creates.items()},
            history.deletes, history.unknown, history.lost,
        )  # fmt: skip
        return [
            *ledger.violations(session),
            *events.violations(session),
            *acknowledged.violations(session, known),
        ]

    def _final_problems(self) -> list[str]:
        with self.checker.read() as session:
            report = verification.verify(session, AuditKeys([KEY]))
        return [f"I13: the audit log: {problem}" for problem in report.problems]


def _described(failure: BaseException) -> str:
    return "".join(traceback.format_exception(failure))
