"""The FastAPI application: routers, error handlers and middleware."""

from fastapi import FastAPI

from mooring import __version__
from mooring.api.auth import authorization
from mooring.api.context import Context
from mooring.api.http import problems
from mooring.api.http.edge import Edge
from mooring.api.openapi import docs, document
from mooring.api.routes import (
    agent,
    api_keys,
    audit,
    events,
    gpus,
    instance_groups,
    instances,
    me,
    nodes,
    projects,
    queue,
    registries,
    reservations,
    secrets,
    service,
    streams,
    users,
)


def create_app(context: Context) -> FastAPI:
    """Create the application. Its database must be open and migrated."""
    app = FastAPI(
        title="Mooring",
        version=__version__,
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    parts = (
        instances, instance_groups, reservations, queue, streams, nodes, gpus, events, projects, users,
        api_keys, me, secrets, registries, audit, service, agent, docs,
    )  # fmt: skip
    for module in parts:
        app.include_router(module.router)
    authorization.require_all_authorized(app)
    problems.install(app)
    document.install(app)
    app.add_middleware(Edge)
    return app
