"""Projects, users and callers as the API shows them."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.api.views.show import show
from mooring.control.tenants import api_keys
from mooring.core.access import SCOPES, Caller, Permission, role_of
from mooring.db import tables
from mooring_client.schemas.api_keys import ApiKey
from mooring_client.schemas.base import Json
from mooring_client.schemas.projects import Member, Project, QuotaValues, User


def project(row: tables.Project, usage: Json | None = None) -> Json:
    quotas, selector = NO_QUOTAS | row.quotas, row.node_selector or {}
    return show(Project, row, quotas=quotas, usage=usage, node_selector=selector)


NO_QUOTAS: Json = QuotaValues().model_dump(mode="json")


def members(session: Session, rows: Sequence[tables.Member]) -> list[Json]:
    query = select(tables.User).where(tables.User.id.in_([row.user_id for row in rows]))
    users = {found.id: found for found in session.scalars(query)}
    return [show(Member, row, name=users[row.user_id].name, email=users[row.user_id].email) for row in rows]


def user(row: tables.User, *, to_admin: bool = True) -> Json:
    return show(User, row, is_admin=row.is_admin if to_admin else None, sso=row.issuer is not None)


def me(session: Session, caller: Caller) -> Json:
    """Describe the caller. Permissions are those of this request; all else is read again."""
    key = session.get(tables.ApiKey, caller.id) if caller.kind == "key" else None
    own_user = session.get(tables.User, caller.user_id) if caller.user_id else None
    names = api_keys.project_names(session, caller.permissions)
    projects = [
        {"id": each, "name": names[each], "role": role_of(permissions), "scopes": _scopes(permissions)}
        for each, permissions in sorted(caller.permissions.items())
        if each in names
    ]
    own_project = next((item for item in projects if item["id"] == caller.project_id), None)
    return {
        "kind": caller.kind,
        "key": show(ApiKey, key) if key else None,
        "user": user(own_user) if own_user else None,
        "project": own_project,
        "role": own_project["role"] if own_project else None,
        "scopes": own_project["scopes"] if own_project else _scopes(caller.everywhere),
        "is_admin": caller.is_admin,
        "projects": projects,
    }


def _scopes(permissions: frozenset[Permission]) -> list[str]:
    return sorted(permissions & SCOPES)
