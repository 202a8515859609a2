"""The script that CI runs tells the truth: few failures run once more, and its last line counts all tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "run"
MAKE = """#!/bin/sh
echo "make $*" >>"$CALLS"
case "$1 $2" in
"test ") printf '%b' "$SAID"; exit "$TEST" ;;
"test PYTHON="*) echo "5 passed in 1.00s"; exit "$NEWEST" ;;
test-all*) echo "2 passed, 1 skipped in 1.00s" ;;
again*) printf '%b' "$SAID_AGAIN"; exit "$AGAIN" ;;
*) exit "$LINT" ;;
esac
"""
FINE = "9 passed in 1.00s\\n"


def failing(*numbers: int, passed: int = 9) -> str:
    names = "".join(f"FAILED tests/unit/test_x.py::test_{n} - assert False\\n" for n in numbers)
    return f"{names}{len(numbers)} failed, {passed} passed in 1.00s\\n"


def ci(folder: Path, **told: str | int) -> subprocess.CompletedProcess[str]:
    """The script, with a `make` that does as it is told, in a checkout that holds nothing else."""
    (folder / "bin").mkdir()
    (folder / "bin/make").write_text(MAKE)
    (folder / "bin/make").chmod(0o755)
    (folder / ".ci").mkdir()
    script = folder / ".ci/run"
    script.write_bytes(SCRIPT.read_bytes())
    script.chmod(0o755)
    usual: dict[str, str | int] = {
        "SAID": FINE,
        "SAID_AGAIN": "",
        "TEST": 0,
        "NEWEST": 0,
        "AGAIN": 0,
        "LINT": 0,
    }
    usual |= {"CALLS": str(folder / "calls"), "NEWEST_PYTHON": ""}
    env = {**os.environ, **{name: str(value) for name, value in {**usual, **told}.items()}}
    env["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
    return subprocess.run([script], env=env, capture_output=True, text=True, check=False)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def closing(ended: subprocess.CompletedProcess[str]) -> str:
    """The last line, without the time."""
    last = ended.stdout.splitlines()[-1]
    assert re.search(r" in \d+\.\d\ds$", last), last
    return last.rpartition(" in ")[0]


def test_the_command_of_the_readme_comes_first_and_then_the_rest(tmp_path: Path) -> None:
    ended = ci(tmp_path)
    assert (ended.returncode, closing(ended)) == (0, "11 passed, 1 skipped")
    assert calls(tmp_path) == [
        "make test",
        "make test-all ARGS=-m 'slow or hypothesis'",
        "make guides",
        "make --keep-going lint types",
    ]


@pytest.mark.parametrize("newest", [0, 2])
def test_a_second_interpreter_counts(tmp_path: Path, newest: int) -> None:
    ended = ci(tmp_path, NEWEST_PYTHON=sys.executable, NEWEST=newest)
    assert ended.returncode == newest
    assert f"make test PYTHON={sys.executable} VENV=.venv-newest" in calls(tmp_path)
    # It failed although no test did: that is an error of its own.
    assert closing(ended) == "16 passed, 1 skipped" + (", 1 errors" if newest else "")


@pytest.mark.parametrize(
    ("said", "again", "code", "last", "unsteady"),
    [
        (failing(1), "1 passed in 1.00s\\n", 0, "11 passed, 1 skipped, 1 unsteady", [1]),
        (failing(1, 2, 3), "3 passed in 1.00s\\n", 0, "11 passed, 1 skipped, 3 unsteady", [1, 2, 3]),
        (failing(1), failing(1, passed=0), 2, "1 failed, 11 passed, 1 skipped", []),
        (failing(1, 2), failing(2, passed=1), 2, "1 failed, 11 passed, 1 skipped, 1 unsteady", [1]),
        (failing(1, 2, 3, 4), None, 2, "4 failed, 11 passed, 1 skipped", []),
        ("no tests ran: broken set-up\\n", None, 2, "2 passed, 1 skipped, 1 errors", []),
    ],
    ids=["one alone", "three alone", "again", "one of two again", "four", "nothing ran"],
)
def test_failures_get_a_second_run_if_they_are_few(
    tmp_path: Path, said: str, again: str | None, code: int, last: str, unsteady: list[int]
) -> None:
    ended = ci(tmp_path, SAID=said, TEST=2, SAID_AGAIN=again or "", AGAIN=code)
    assert (ended.returncode, closing(ended)) == (code, last), ended.stdout
    assert ("make again " in [f"{call} " for call in calls(tmp_path)]) is (again is not None)
    named = [line for line in ended.stdout.splitlines() if line.startswith("unsteady: ")]
    assert named == [f"unsteady: tests/unit/test_x.py::test_{n}" for n in unsteady]
    # Everything else ran all the same.
    assert calls(tmp_path)[-1] == "make --keep-going lint types"


def test_lint_counts(tmp_path: Path) -> None:
    ended = ci(tmp_path, LINT=2)
    assert (ended.returncode, closing(ended)) == (2, "11 passed, 1 skipped")
