"""Makes text from the web safe to print."""

from __future__ import annotations

import re

_BREAKS = re.compile(r"\s*[\r\n]\s*")
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters but tab and line feed, and what cannot be encoded."""
_TURNING = re.compile(r"[\u2028-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """Returns the text without control characters. Line breaks stay, as `\\n`."""
    return STEERING.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def printable(text: str) -> str:
    """Returns the text without characters that control a terminal or the direction of writing."""
    return _TURNING.sub("\ufffd", harmless(text))


def one_line(text: str) -> str:
    """Returns the same on one line."""
    return printable(_BREAKS.sub(" ", text))
