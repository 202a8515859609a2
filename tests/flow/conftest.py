"""What tests of whole crawls share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.command import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """The command in an empty directory. Whatever it started is gone after the test."""
    with Shell(tmp_path) as made:
        yield made
