"""Errors as problem documents (RFC 9457): what happened, to what, and how to solve it."""

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
    """Raised anywhere below the gate; becomes the response."""

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
    """Returns what a caller may know about an error. A frontier that cannot serve is a temporary fault of the
    server: 503. A usage error is the caller's: 422."""
    if isinstance(error, NoSuchJob):
        return Problem(404, str(error), hint="`GET /jobs` lists the jobs")
    if isinstance(error, NoSuchSchedule):
        return Problem(404, str(error), hint="`GET /schedules` lists the schedules")
    if isinstance(error, ScheduleExists):
        return Problem(
            409, str(error), hint="`replace: true` replaces it; `PATCH` changes when the existing one fires"
        )
    if isinstance(error, FrontierError):
        # The error's text may contain addresses of servers, so only the log has it.
        return Problem(503, "the frontier is temporarily unavailable", headers={"Retry-After": "5"})
    if isinstance(error, MissingExtra):
        return Problem(501, str(error), hint=error.hint)
    if isinstance(error, UsageError):
        return Problem(422, str(error), hint=error.hint)
    return Problem(500, "internal error", hint="the server's log has the details")
