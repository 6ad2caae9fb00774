"""The FastAPI application: routers, error handlers and middleware."""

from functools import cache

from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute

from mooring import __version__
from mooring.api.auth import authorization
from mooring.api.context import Context
from mooring.api.http import problems
from mooring.api.http.edge import Edge
from mooring.api.openapi import docs, document
from mooring.api.routes import (
    agent,
    api_keys,
    applying,
    audit,
    commands,
    compat_prime,
    docker_context,
    events,
    gpus,
    instance_groups,
    instances,
    logs,
    me,
    nodes,
    port_links,
    projects,
    queue,
    registries,
    reservations,
    secrets,
    service,
    ssh_keys,
    streams,
    templates,
    users,
    volumes,
    webhooks,
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
    app.router.routes.extend(_operations())
    authorization.require_all_authorized(app)
    problems.install(app)
    document.install(app)
    app.add_middleware(Edge)
    return app


@cache
def _operations() -> tuple[BaseRoute, ...]:
    """Return the routes of all operations. FastAPI takes 0.1 s to analyze them: once per process."""
    router = APIRouter()
    router.include_router(agent.frequent)
    for module in (
        instances, instance_groups, reservations, volumes, applying, queue, logs, commands, streams,
        port_links, nodes, gpus, events, projects, users, api_keys, me, docker_context, ssh_keys, secrets,
        registries, templates, webhooks, audit, service, agent, docs, compat_prime,
    ):  # fmt: skip
        router.include_router(module.router)
    return tuple(router.routes)
