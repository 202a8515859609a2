"""How the user calls shoal, so that hints work as they are typed: `.venv/bin/shoal jobs` if that is what the
user typed, and the command that installs an extra from a checkout."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit


@cache
def command() -> str:
    """Returns `shoal`, or the path that the user typed if `shoal` would start nothing or another program. For
    `python -m shoal` it returns `shoal`: that user knows what to type instead."""
    program = sys.argv[0] if sys.argv else ""
    if Path(program).name != "shoal" or _same(shutil.which("shoal"), program):
        return "shoal"
    return shlex.quote(program)


def install(extra: str) -> str:
    """Returns the command that installs an extra into this environment, from the source of the package."""
    pip = "pip" if _same(shutil.which("pip"), str(Path(sys.executable).with_name("pip"))) else ""
    pip = pip or f"{shlex.quote(nearby(sys.executable))} -m pip"
    source, editable = _source()
    return f"{pip} install {'-e ' if editable else ''}'{source}[{extra}]'"


def nearby(path: str) -> str:
    """Returns a path relative to the current directory if it lies below it."""
    try:
        near = os.path.relpath(path)
    except (ValueError, OSError):
        return path
    return path if near.startswith("..") else near


def _source() -> tuple[str, bool]:
    """Returns the package's name, or the directory it was installed from, and whether it is editable."""
    try:
        text = metadata.distribution("shoal").read_text("direct_url.json")
        found = json.loads(text or "{}")
        if not str(found.get("url", "")).startswith("file:") or "dir_info" not in found:
            return "shoal", False
        place = nearby(unquote(urlsplit(found["url"]).path))
        return place, bool(found["dir_info"].get("editable"))
    except (metadata.PackageNotFoundError, ValueError, OSError):
        return "shoal", False


def _same(one: str | None, other: str) -> bool:
    try:
        return one is not None and Path(one).samefile(other)
    except OSError:
        return False
