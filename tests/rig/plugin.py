"""Installs packages that bring parts of their own: a folder with their modules on the path, and what pip
writes beside them."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin"


def install(folder: Path, package: Path = EXAMPLE) -> Path:
    """Put a package into `folder` as pip does, with the entry points of its own pyproject.toml. pip itself
    would need the build backend, which lives in a package index."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    for module in package.glob("*/__init__.py"):
        made = shutil.ignore_patterns("__pycache__")
        shutil.copytree(module.parent, folder / module.parent.name, ignore=made)
    describe(folder, project["name"], project["version"], project["entry-points"])
    return folder


def describe(folder: Path, name: str, version: str, entry_points: Mapping[str, Mapping[str, str]]) -> None:
    """Write down an installed package: its name, version and entry points."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, points in entry_points.items()
        for line in (f"[{group}]", *(f"{point} = {value}" for point, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """The packages in a folder are installed while the body runs: here, and in processes that start."""
    before = os.environ.get("PYTHONPATH")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
