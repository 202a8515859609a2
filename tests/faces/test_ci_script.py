"""What CI runs tells the truth: a second look for a few failures, and an end that is theirs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "run"
MAKE = """#!/bin/sh
echo "make $*" >>"$CALLS"
case "$1" in
test) printf '%b' "$SAID"; exit "$TEST" ;;
again) exit "$AGAIN" ;;
*) exit "$LINT" ;;
esac
"""


def failing(count: int) -> str:
    names = "".join(f"FAILED tests/unit/test_x.py::test_{n} - assert False\\n" for n in range(count))
    return f"{names}{count} failed, 9 passed in 1.00s\\n"


@pytest.mark.parametrize(
    ("said", "test", "again", "lint", "code", "looked_again"),
    [
        ("9 passed in 1.00s\\n", 0, 1, 0, 0, False),
        ("9 passed in 1.00s\\n", 0, 0, 2, 2, False),
        (failing(1), 2, 0, 0, 0, True),
        (failing(3), 2, 0, 0, 0, True),
        (failing(1), 2, 2, 0, 2, True),
        (failing(1), 2, 0, 2, 2, True),
        (failing(4), 2, 0, 0, 2, False),
        ("no tests ran: broken set-up\\n", 2, 0, 0, 2, False),
    ],
)
def test_how_it_ends(
    tmp_path: Path, said: str, test: int, again: int, lint: int, code: int, looked_again: bool
) -> None:
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "make").chmod(0o755)
    calls = tmp_path / "calls"
    told = {"CALLS": str(calls), "SAID": said, "TEST": str(test), "AGAIN": str(again), "LINT": str(lint)}
    env = {**os.environ, **told, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run([SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stdout
    made = calls.read_text().splitlines()
    assert made[0] == "make test"
    assert made[-1] == "make --keep-going lint types"
    assert ("make again" in made) is looked_again
    # Whoever passes only alone is named.
    assert ended.stdout.count("unsteady: ") == (said.count("FAILED") if looked_again and not again else 0)
    if "passed" in said:
        closing = ended.stdout.splitlines()[-1]
        assert "9 passed in 1.00s" in closing
        assert ("failed" in closing) is ("FAILED" in said and not (looked_again and not again))
