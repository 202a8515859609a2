"""Errors as problem documents (RFC 9457): what happened, to what, and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from shoal.errors import (
    FrontierError,
    MissingExtra,
    NoSuchJob,
    NoSuchSchedule,
    ScheduleExists,
    ShoalError,
    UsageError,
)

MEDIA_TYPE = "application/problem+json"


class Problem(Exception):
    """Raised anywhere below the gate; becomes the answer."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        hint: str = "",
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.hint = hint
        self.headers = dict(headers or {})
        self.more = more

    def response(self) -> Response:
        document: dict[str, Any] = {
            "type": "about:blank",
            "title": title_of(self.status),
            "status": self.status,
            "detail": self.detail,
        }
        if self.hint:
            document["hint"] = self.hint
        body = msgspec.json.encode(document | self.more)
        return Response(body, self.status, headers=self.headers, media_type=MEDIA_TYPE)


def title_of(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def problem_of(error: ShoalError) -> Problem:
    """What a caller may know about an error of ours. A frontier that cannot serve is our trouble and
    passes: 503. Everything else was asked for wrongly: 422."""
    if isinstance(error, NoSuchJob):
        return Problem(404, str(error), hint="`GET /jobs` lists the jobs")
    if isinstance(error, NoSuchSchedule):
        return Problem(404, str(error), hint="`GET /schedules` lists the schedules")
    if isinstance(error, ScheduleExists):
        return Problem(
            409, str(error), hint="`replace: true` puts this in its place, PATCH changes when it fires"
        )
    if isinstance(error, FrontierError):
        # Its text may name addresses of servers; the log has it.
        return Problem(503, "the frontier cannot serve just now", headers={"Retry-After": "5"})
    if isinstance(error, MissingExtra):
        return Problem(501, str(error), hint=error.hint)
    if isinstance(error, UsageError):
        return Problem(422, str(error), hint=error.hint)
    return Problem(500, "something went wrong here; the server's log tells what")
