"""`/docs` without a network: Swagger UI comes from a package, its start from here.

No script stands in the page itself, so the policy of the page can forbid them. Files are read once and
sent from memory: no ranges, no paths made of what somebody sent.
"""

from __future__ import annotations

from importlib.resources import files

import fastapi_offline
from fastapi import APIRouter
from starlette.responses import Response

from shoal.api.problems import Problem

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

router = APIRouter(include_in_schema=False)


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
