"""Swagger UI at `/docs` from files that an installed package brings: no page here asks the internet."""

from importlib.resources import files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse, Response

from mooring.api.gate import GatedRoute

router = APIRouter(include_in_schema=False, route_class=GatedRoute)

_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}


@router.get("/docs")
async def docs() -> HTMLResponse:
    return get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="Mooring API",
        swagger_js_url="/docs/assets/swagger-ui-bundle.js",
        swagger_css_url="/docs/assets/swagger-ui.css",
        swagger_favicon_url="/docs/assets/favicon-32x32.png",
        swagger_ui_parameters={
            "persistAuthorization": True,
            "displayRequestDuration": True,
            "docExpansion": "list",
        },
    )


def _serve(name: str, media_type: str) -> None:
    content = files("fastapi_swagger.resources").joinpath(name).read_bytes()

    @router.get(f"/docs/assets/{name}")
    async def asset() -> Response:
        return Response(content, media_type=media_type, headers={"Cache-Control": "max-age=86400"})


for _name, _media_type in _ASSETS.items():
    _serve(_name, _media_type)
