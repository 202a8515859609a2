"""`/`, which lists the main endpoints, and `/docs`, which works without a network: Swagger UI comes from a
package, the script that starts it from this file.

The page has no inline script, so its content security policy can forbid them. Files are sent whole, from
memory: no ranges, and no path is built from a request.
"""

from __future__ import annotations

from importlib.resources import files

import fastapi_offline
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from shoal import __version__
from shoal.api.problems import Problem
from shoal.api.signin import html_page, wants_page

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>shoal API</title>
<link rel="icon" href="/docs/favicon.png"><link rel="stylesheet" href="/docs/swagger-ui.css"></head>
<body><div id="swagger-ui"></div>
<script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/start.js"></script></body></html>
"""
_START = """SwaggerUIBundle({url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true});
"""
_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
    "favicon.png": "image/png",
}
_CACHED = {"Cache-Control": "private, max-age=3600"}

_LINKS = {
    "/docs": "every endpoint, with a form to try it",
    "/jobs": "jobs",
    "/queue/status": "queues and workers",
    "/health": "health of the service and its parts",
    "/metrics": "metrics for Prometheus",
    "/openapi.json": "OpenAPI description",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def home(request: Request) -> Response:
    """A list of links, as a page or as JSON."""
    vary = {"Vary": "Accept, Cookie"}
    if wants_page(dict(request.scope["headers"])):
        lines = "\n".join(f'<li><a href="{path}">{path}</a> {what}</li>' for path, what in _LINKS.items())
        return html_page(
            "The job service", f"<p>The job service, version {__version__}.</p>\n<ul>\n{lines}</ul>\n"
        )
    links = {path.strip("/").partition(".")[0].replace("/", "_"): path for path in _LINKS}
    return JSONResponse({"name": "shoal", "version": __version__, "links": links}, headers=vary)


@router.get("/docs")
async def page() -> Response:
    return Response(_PAGE, media_type="text/html", headers={"Content-Security-Policy": _POLICY})


@router.get("/docs/{name}")
async def asset(name: str) -> Response:
    if name == "start.js":
        return Response(_START, media_type="text/javascript", headers=_CACHED)
    if name not in _ASSETS:
        raise Problem(404, "no such file")
    body = files(fastapi_offline).joinpath("static", name).read_bytes()
    return Response(body, media_type=_ASSETS[name], headers=_CACHED)
