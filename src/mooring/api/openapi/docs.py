"""Swagger UI at `/docs`, from files of an installed package: the page loads nothing from the internet.

The page allows no inline script (R30): an injected script could use the key that the user enters.
"""

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from mooring.api.auth.authorization import AuthorizedRoute

router = APIRouter(include_in_schema=False, route_class=AuthorizedRoute)

_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Mooring API</title>
<link rel="stylesheet" href="/docs/assets/swagger-ui.css">
<link rel="icon" href="/docs/assets/favicon-32x32.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="/docs/assets/swagger-ui-bundle.js"></script>
<script src="/docs/assets/start.js"></script>
</body>
</html>
"""
_START = b"""SwaggerUIBundle({
  url: '/openapi.json',
  dom_id: '#swagger-ui',
  layout: 'BaseLayout',
  deepLinking: true,
  displayRequestDuration: true,
  docExpansion: 'list',
  presets: [SwaggerUIBundle.presets.apis],
});
"""
# Swagger UI uses inline styles, and data: URLs for its icons.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/docs")
async def docs() -> HTMLResponse:
    return HTMLResponse(_PAGE, headers={"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"})


def _serve(name: str, media_type: str, content: bytes) -> None:
    @router.get(f"/docs/assets/{name}")
    async def asset() -> Response:
        return Response(content, media_type=media_type, headers={"Cache-Control": "max-age=86400"})


for _name, _media_type in _ASSETS.items():
    _serve(_name, _media_type, files("fastapi_swagger.resources").joinpath(_name).read_bytes())
_serve("start.js", "text/javascript", _START)
