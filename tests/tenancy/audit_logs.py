"""Helpers to verify the audit log, and to change it as an attacker with access to the database."""

from typing import Any

from sqlalchemy import func, select, text
from typer.testing import CliRunner

from mooring.control.audit import verification
from mooring.control.audit.verification import VerificationReport
from mooring.db.session import Database
from mooring.db.tables import AuditEntry, AuditHead, AuditLink
from mooring_client.cli.main import app
from tests.service import RunningService
from tests.testbed.waiting import wait_until

TABLES = ("audit_log", "audit_links", "audit_heads")


def await_links(service: RunningService) -> None:
    """Wait until every row is linked and a head exists."""

    def all_linked() -> bool:
        with service.plane.database.read() as session:
            rows = session.scalar(select(func.count()).select_from(AuditEntry))
            links = session.scalar(select(func.count()).select_from(AuditLink))
            return rows == links and session.scalar(select(AuditHead.number).limit(1)) is not None

    wait_until(all_linked, 20)


def verified(service: RunningService, *kept_heads: str) -> VerificationReport:
    with service.plane.database.read() as session:
        return verification.verify(session, service.plane.audit_keys, kept_heads)


def mooring(service: RunningService, *arguments: str, **settings: str) -> Any:
    """Run a `mooring` command with the server's settings."""
    environment = {
        "MOORING_DATABASE_URL": service.plane.settings.resolved_database_url,
        "MOORING_DATA_DIR": str(service.plane.settings.data_dir),
        **settings,
    }
    return CliRunner().invoke(app, arguments, env=environment)


def without_triggers(database: Database, *statements: str) -> None:
    """Disable the triggers and run the statements, as the owner of the tables can."""
    with database.engine.begin() as connection:
        for table in TABLES:
            if connection.dialect.name == "postgresql":
                connection.execute(text(f"ALTER TABLE {table} DISABLE TRIGGER ALL"))
                continue
            for event in ("update", "delete", "replace"):
                connection.execute(text(f"DROP TRIGGER IF EXISTS {table}_no_{event}"))
        for statement in statements:
            connection.execute(text(statement))
