"""Where settings come from: which names are known, which of them wins, what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.errors import UsageError
from shoal.settings import FOREIGN, Settings, load, variables


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in {name for setting in Settings.model_fields for name in variables(setting)}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_a_plain_name_in_the_environment_is_not_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for spelled in {name, name.upper(), name.title()} - set(variables(name)):
        monkeypatch.setenv(spelled, "nonsense")
    assert name not in load().model_fields_set


def test_the_guard_is_not_turned_off_by_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ALLOW_PRIVATE", "0")
    monkeypatch.setenv("ALLOW_PRIVATE", "1")
    assert load().allow_private is False
    monkeypatch.setenv("SHOAL_ALLOW_PRIVATE", "1")
    assert load().allow_private is True


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("MAX_PAGES", "max_pages"),
        ("MAX_WORKERS", "workers"),
        ("REQUEST_TIMEOUT", "timeout"),
        ("REQUEST_DELAY", "request_delay"),
        ("CELERY_TASK_MAX_RETRIES", "celery_task_max_retries"),
        ("CELERY_WORKER_CONCURRENCY", "celery_worker_concurrency"),
    ],
)
def test_names_of_other_systems_count_after_our_own(
    variable: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "6")
    assert getattr(load(), name) == 6
    monkeypatch.setenv(f"SHOAL_{name.upper()}", "7")
    assert getattr(load(), name) == 7
    assert getattr(load(**{name: 8}), name) == 8


def test_files_have_plain_names_and_come_after_the_environment(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "pyproject.toml").write_text("[tool.other]\nx = 1\n[tool.shoal]\nretries = 2\ndepth = 2\n")
    (place / "shoal.toml").write_text('retries = 4\ninclude = ["*/a/*"]\n')
    assert (load().retries, load().depth, load().include) == (4, 2, ("*/a/*",))
    monkeypatch.setenv("SHOAL_RETRIES", "5")
    monkeypatch.setenv("SHOAL_INCLUDE", "*/b/*, */c/*")
    assert (load().retries, load().depth, load().include) == (5, 2, ("*/b/*", "*/c/*"))


def refused(**given: Any) -> UsageError:
    with pytest.raises(UsageError) as told:
        load(**given)
    return told.value


def test_a_misspelt_argument_is_refused() -> None:
    error = refused(max_page=5)
    assert "max_page" in str(error) and "max_pages" in error.hint
    assert "nosuchsetting" in str(refused(nosuchsetting=1))
    assert "nosuchsetting" in str(refused(nosuchsetting=None))
    for wrong in (
        lambda: shoal.crawl("http://a.test/", max_page=5),
        lambda: shoal.Shoal(max_page=5),
        lambda: shoal.Shoal().crawl("http://a.test/", max_page=5),
    ):
        with pytest.raises(UsageError, match="max_page"):
            wrong()


async def test_a_misspelt_argument_of_a_run_is_refused() -> None:
    with pytest.raises(UsageError, match="nosuchsetting"):
        await shoal.Shoal().run("one", nosuchsetting=1)


def test_a_misspelt_name_in_a_file_is_refused(place: Path) -> None:
    (place / "shoal.toml").write_text("maxpages = 3\n")
    error = refused()
    assert "shoal.toml" in str(error) and "maxpages" in str(error) and "max_pages" in error.hint
    (place / "shoal.toml").unlink()
    (place / "pyproject.toml").write_text("[tool.shoal]\nmaxpages = 3\n")
    error = refused()
    assert "pyproject.toml" in str(error) and "maxpages" in str(error) and "max_pages" in error.hint


def test_a_misspelt_variable_is_nobodys_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_MAXPAGES", "3")
    assert load().max_pages == 10_000
    assert "SHOAL_MAXPAGES" in os.environ


@pytest.mark.parametrize(
    "given",
    [
        {"headers": "Authorization: topsecret"},
        {"headers": {"Authorization": ["topsecret"]}},
        {"tokens": [{"name": "ci", "sha256": "topsecret"}]},
        {"frontier": ["redis://:topsecret@h"]},
        {"celery_broker_url": ["redis://:topsecret@h"]},
        {"pasword": "topsecret"},
    ],
)
def test_what_may_be_secret_is_not_told(given: dict[str, Any]) -> None:
    assert "topsecret" not in str(refused(**given))


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_an_empty_variable_of_another_system_is_not_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = getattr(load(), name)
    monkeypatch.setenv(FOREIGN[name], "")
    assert getattr(load(), name) == usual
    assert name not in load().model_fields_set
