"""The API as one ASGI application: routes below, the gate on top."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from shoal import __version__
from shoal.api import batch, docs, jobs, operations, schedules, signin
from shoal.api.middleware import LOOPBACK, Gate, Policy
from shoal.api.models import ProblemView
from shoal.api.problems import MEDIA_TYPE, Problem, problem_of, title_of
from shoal.api.rate_limit import RateLimiter
from shoal.api.service import Service
from shoal.api.tokens import Tokens
from shoal.errors import FrontierError, ShoalError
from shoal.politeness.pacing import burst_of, parse_rate
from shoal.settings import Settings

ROUTERS = tuple(module.router for module in (jobs, batch, operations, schedules, docs, signin))
SHOWN_ERRORS = 20
EVERYWHERE = frozenset(("", "0.0.0.0", "::"))  # noqa: S104 - excluded from the allowed names
"""Addresses to listen on that no Host header names."""
GUESSES = (6.0, 10)
"""Gap and burst of wrong tokens from one address: ten per minute."""
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": title_of(status), "content": {MEDIA_TYPE: {}}, "model": ProblemView}
    for status in (400, 401, 403, 404, 413, 415, 421, 422, 429, 500, 503)
}


def build(
    service: Service,
    tokens: Tokens,
    *,
    loopback: bool,
    address: str = "",
    log: Callable[[str], None] | None = None,
) -> Gate:
    """Returns the application of a service. With `loopback` only this machine can reach it; `address` is
    where it listens; `log` receives a line for each request."""
    app = FastAPI(
        title="shoal",
        version=__version__,
        description=(
            "Submit crawls, follow their progress, download their results, and operate the crawler."
            " Errors are problem documents (RFC 9457)."
        ),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_PROBLEMS,
    )
    app.state.service = service
    guesses = RateLimiter(*GUESSES)
    sessions = signin.Sessions(tokens, guesses)
    app.state.sessions = sessions
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ShoalError, _error)
    app.add_exception_handler(Exception, _unexpected)
    _describe(app)
    settings = service.session.settings
    return Gate(
        app,
        policy_of(settings, loopback=loopback, address=address),
        tokens,
        sessions,
        guesses,
        tell=service.tell,
        log=log,
        meter=service.meters.count,
    )


def policy_of(settings: Settings, *, loopback: bool, address: str = "") -> Policy:
    """On loopback, no token is needed unless the settings require one, but the Host header must name this
    service. Elsewhere a token is always needed, and the Host header may have any name unless `allowed_hosts`
    lists the valid ones. The host from the settings and the bound address always name this service."""
    listed = {host.lower().strip("[]") for host in settings.allowed_hosts}
    own = {host.lower().strip("[]") for host in (settings.host, address)} - EVERYWHERE
    gap = parse_rate(settings.api_rate)
    return Policy(
        hosts=LOOPBACK | listed | own if loopback or listed else None,
        open=loopback and not settings.require_token,
        max_body=settings.max_request,
        gap=gap,
        burst=burst_of(settings.api_rate),
    )


def _describe(app: FastAPI) -> None:
    """Add to the OpenAPI schema the content type of problem documents, and that a token may be needed."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
            schemes["token"] = {"type": "http", "scheme": "bearer"}
            schema["security"] = [{"token": []}, {}]
            schema["paths"]["/healthz"]["get"]["security"] = []
            for operations in schema["paths"].values():
                for operation in operations.values():
                    for status, response in operation["responses"].items():
                        _set_problem_type(status, response)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _set_problem_type(status: str, response: dict[str, Any]) -> None:
    content = response.get("content", {})
    plain = content.get("application/json", {}).get("schema", {})
    if plain.get("$ref", "").endswith("/ProblemView"):
        response["content"] = {MEDIA_TYPE: {"schema": plain}}
    elif status == "503" and plain:
        # A 503 of /health is a Health document or a problem document.
        content.setdefault(MEDIA_TYPE, {"schema": {"$ref": "#/components/schemas/ProblemView"}})


async def _problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response()


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        # The framework lists only the methods of the first route that matches.
        allow = {"Allow": ", ".join(_methods(request, request.url.path))}
        return Problem(
            405, "this path does not support this method", hint=f"use {allow['Allow']}", headers=allow
        ).response()
    if error.status_code == 404:
        path = request.url.path.rstrip("/")
        known = path != request.url.path and _methods(request, path)
        hint = f"use {path}, without the / at the end" if known else "`GET /docs` lists all endpoints"
        return Problem(404, "this path does not exist", hint=hint).response()
    return Problem(error.status_code, error.detail, headers=error.headers or {}).response()


def _methods(request: Request, path: str) -> list[str]:
    """Returns the methods that a path supports, of all routes."""
    found: set[str] = set()
    scope = {**request.scope, "path": path}
    for route in [*request.app.routes, *(route for router in ROUTERS for route in router.routes)]:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            found |= route.methods or set()
    if "GET" in found:
        found.add("HEAD")
    return sorted(found)


async def _invalid(_: Request, error: Exception) -> Response:
    """Says what is wrong and where, but never repeats the value: it may be a secret."""
    assert isinstance(error, RequestValidationError)
    errors = [
        {
            "where": ".".join(str(part) for part in each["loc"]),
            "message": each["msg"].removeprefix("Value error, "),
        }
        for each in error.errors()[:SHOWN_ERRORS]
    ]
    first = errors[0] if errors else {"where": "body", "message": "the request is invalid"}
    return Problem(422, f"{first['where']}: {first['message']}", errors=errors).response()


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ShoalError)
    if isinstance(error, FrontierError):
        request.app.state.service.tell(f"error: {error}")
    return problem_of(error).response()


async def _unexpected(_: Request, error: Exception) -> Response:
    """The framework raises the error again after this, and the gate logs it."""
    return Problem(500, "internal error", hint="the server's log has the details").response()
