"""A small disk, for what happens when it is full. Only root may mount one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A disk of 16 MB: the write-ahead log alone may take four."""
    if os.geteuid():
        pytest.skip("only root may mount a small disk")
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path, left: int) -> Path:
    """A file that leaves only so many bytes."""
    ballast = disk / "ballast"
    stat = os.statvfs(disk)
    ballast.write_bytes(b"\0" * (stat.f_bavail * stat.f_frsize - left))
    return ballast
