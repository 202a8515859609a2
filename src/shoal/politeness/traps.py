"""Traps: URLs that a site generates without end. Pure checks of the text of one URL.

Calendars, session ids and wildcard subdomains cannot be recognised in a single URL. The page budgets of the
job and of each host end those.
"""

from __future__ import annotations

MAX_SEGMENTS = 20
MAX_REPEATS = 2
"""A segment, or a cycle of segments, may occur this many times in a row."""
MAX_SAME = 4
"""A segment may occur this many times anywhere in the path."""
MAX_PARAMETERS = 24
MAX_SAME_PARAMETER = 8
MAX_QUERY = 1024


def trap(url: str) -> str:
    """Returns why the canonical `url` looks like a trap, in a few words; "" if it does not."""
    path, _, query = url.partition("?")
    parts = path.split("/")
    # No segment occurs three times in a short path. This ends the check for nearly every URL.
    usual = len(parts) <= MAX_SEGMENTS and len(parts) - len(set(parts)) < MAX_REPEATS
    reason = "" if usual else _path_trap([part for part in parts[3:] if part])
    return reason or (_query_trap(query) if query else "")


def _path_trap(segments: list[str]) -> str:
    if len(segments) > MAX_SEGMENTS:
        return f"{len(segments)} path segments, at most {MAX_SEGMENTS}"
    for length in range(1, len(segments) // (MAX_REPEATS + 1) + 1):
        run = 0
        for at in range(length, len(segments)):
            run = run + 1 if segments[at] == segments[at - length] else 0
            if run >= length * MAX_REPEATS:
                cycle = "/".join(segments[at - length + 1 : at + 1])
                return f"/{cycle[:60]} repeats more than {MAX_REPEATS} times"
    for segment in set(segments):
        if segments.count(segment) > MAX_SAME:
            return f"/{segment[:60]} occurs more than {MAX_SAME} times in the path"
    return ""


def _query_trap(query: str) -> str:
    if len(query) > MAX_QUERY:
        return f"a query of {len(query):,} characters, at most {MAX_QUERY:,}"
    if query.count("&") < MAX_SAME_PARAMETER:
        return ""
    names = [pair.partition("=")[0] for pair in query.split("&")]
    if len(names) > MAX_PARAMETERS:
        return f"{len(names)} query parameters, at most {MAX_PARAMETERS}"
    for name in set(names):
        if names.count(name) > MAX_SAME_PARAMETER:
            return f"query parameter {name[:60]!r} occurs more than {MAX_SAME_PARAMETER} times"
    return ""
