"""Every flag has its variable: read where it is meant, never where it would do harm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli import app, variables
from shoal.cli.variables import flag_variables, is_setting
from shoal.engine.supervisor import PARENT
from tests.rig.command import Ran

Shoal = Callable[..., Ran]
pytestmark = pytest.mark.usefixtures("place")


def test_flags_that_are_no_settings(shoal: Shoal, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    for name, value in {"OUT": "a.jsonl", "QUIET": "1", "JSON": "1", "FRONTIER": "memory:"}.items():
        monkeypatch.setenv(f"SHOAL_{name}", value)
    code, out, err = shoal("crawl", "--demo")
    assert (code, err) == (1, "")
    assert json.loads(out)["out"] == "a.jsonl"
    assert len((place / "a.jsonl").read_text().splitlines()) == json.loads(out)["items"]


def test_a_typed_flag_wins(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_LIMIT", "nonsense")
    code, _, err = shoal("jobs")
    assert code == 2 and "SHOAL_LIMIT" in err
    assert shoal("jobs", "--limit", "3", "--json") == (0, "[]\n", "")
    monkeypatch.setenv("SHOAL_LIMIT", "")
    monkeypatch.setenv("SHOAL_JSON", "0")
    code, out, err = shoal("jobs")
    assert (code, out) == (0, "") and "no jobs yet" in err


def test_a_typed_flag_wins_over_another_word_for_it(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    monkeypatch.setenv("SHOAL_RUN_ID", "elsewhere")
    assert "no job 'here'" in shoal("worker", "--job", "here", "--drain").err
    assert "no job 'elsewhere'" in shoal("worker").err
    monkeypatch.setenv("SHOAL_URLS_FILE", "missing.txt")
    assert shoal("enqueue", "j", "http://a.test/").code == 0
    assert "missing.txt" in shoal("enqueue", "j").err


def test_variables_never_choose_what_is_changed(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALL", "JOB", "HOST", "ERROR", "ID", "RATE", "CONCURRENCY", "BURST", "TO", "URL"):
        monkeypatch.setenv(f"SHOAL_{name}", "1")
    assert "no dead letters selected" in shoal("dead", "purge").err
    assert "no dead letters selected" in shoal("dead", "retry").err
    assert "nothing to set" in shoal("lanes", "set", "a.test").err
    assert shoal("lanes", "pause").code == 2
    assert shoal("cancel").code == 2
    assert shoal("export", "j").code == 2


def test_a_supervised_process_hears_its_supervisor_only(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_JSON", "1")
    assert shoal("jobs").out == "[]\n"
    assert variables.PARENT == PARENT
    monkeypatch.setenv(PARENT, str(os.getppid()))
    assert shoal("jobs").out == ""


def test_settings_are_left_to_the_settings(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_INCLUDE", "*/a b/*,re:(")
    code, _, err = shoal("crawl", "http://a.test/")
    assert code == 2 and "bad pattern" in err


def test_which_flags_have_a_variable() -> None:
    found = {(" ".join(path), flag): variable for path, flag, variable in flag_variables(app)}
    for command, flag, variable in [
        ("crawl", "--out", "SHOAL_OUT"),
        ("crawl", "--resume", "SHOAL_RESUME"),
        ("crawl", "--allow-private", "SHOAL_ALLOW_PRIVATE"),
        ("run", "--run-id", "SHOAL_RUN_ID"),
        ("run", "--urls-file", "SHOAL_URLS_FILE"),
        ("run", "--limit", "SHOAL_LIMIT"),
        ("jobs", "--json", "SHOAL_JSON"),
        ("worker", "--quiet", "SHOAL_QUIET"),
    ]:
        assert found[command, flag] == variable
    assert is_setting("SHOAL_ALLOW_PRIVATE") and not is_setting("SHOAL_OUT")


def test_doctor_remarks_a_misspelt_variable(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_MAXPAGES", "3")
    monkeypatch.setenv("SHOAL_MAX_PAGES", "3")
    monkeypatch.setenv("SHOAL_OUT", "a.jsonl")
    code, out, err = shoal("doctor", "--quick", "--frontier", "memory:")
    assert code == 0
    assert "SHOAL_MAXPAGES is not a setting or a flag" in out
    assert out.count("is not a setting") == 1
    assert "environment: " in err


@pytest.mark.parametrize("command", ["crawl", "jobs", "worker", "migrate"])
def test_help_names_every_frontier(shoal: Shoal, command: str) -> None:
    told = " ".join(shoal(command, "--help").out.replace("│", " ").split())
    for known in ("sqlite:///", "redis://", "postgresql://", "memory:"):
        assert known in told
