"""How a person here calls us, so that a hint works as it is typed: `.venv/bin/shoal jobs` where that is what
was typed, and the way in which an extra is installed from a checkout."""

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
    """`shoal`, unless that would start nothing or something else: then the path that was typed. Who typed
    `python -m shoal` knows what to put in its place."""
    program = sys.argv[0] if sys.argv else ""
    if Path(program).name != "shoal" or _same(shutil.which("shoal"), program):
        return "shoal"
    return shlex.quote(program)


def install(extra: str) -> str:
    """What installs an extra into the environment that runs this, from where it came."""
    pip = "pip" if _same(shutil.which("pip"), str(Path(sys.executable).with_name("pip"))) else ""
    pip = pip or f"{shlex.quote(nearby(sys.executable))} -m pip"
    source, editable = _source()
    return f"{pip} install {'-e ' if editable else ''}'{source}[{extra}]'"


def nearby(path: str) -> str:
    """A path as short as it can be typed here."""
    try:
        near = os.path.relpath(path)
    except (ValueError, OSError):
        return path
    return path if near.startswith("..") else near


def _source() -> tuple[str, bool]:
    """The name of the package, or the directory it was installed from; and whether it runs there."""
    try:
        told = metadata.distribution("shoal").read_text("direct_url.json")
        found = json.loads(told or "{}")
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
