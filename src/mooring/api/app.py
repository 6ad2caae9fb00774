"""The FastAPI application: routers, error handling and the edge around them."""

from fastapi import FastAPI

from mooring import __version__
from mooring.api import agent, docs, errors, events, gpus, instances, nodes, openapi, service, streams
from mooring.api.context import Context
from mooring.api.edge import Edge


def create_app(context: Context) -> FastAPI:
    """An application over an open database that has been migrated."""
    app = FastAPI(
        title="Mooring",
        version=__version__,
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    for module in (instances, streams, nodes, gpus, events, service, agent, docs):
        app.include_router(module.router)
    errors.install(app)
    openapi.install(app)
    app.add_middleware(Edge)
    return app
