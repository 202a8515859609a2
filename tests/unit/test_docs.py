"""The documentation is true: reference pages are fresh, links lead somewhere, commands exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest

from shoal.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
WORST = re.compile(r"\b(?:nobody|somebody|everybody|whoever|simply|just|easy|easily)\b", re.IGNORECASE)
"""What docs/style.md rules out first. That page and those made from the code are not looked at."""
PROSE = [page for page in PAGES if page.name != "style.md" and page.parent.name != "reference"]


@lru_cache(maxsize=1)
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts/make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """The names under which the headings of a page can be linked."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_reference_pages_are_fresh() -> None:
    for name, text in reference().pages().items():
        assert (ROOT / "docs/reference" / name).read_text() == text, f"{name}: run `make docs`"


def test_every_setting_has_a_heading() -> None:
    assert set(Settings.model_fields) <= anchors(ROOT / "docs/reference/settings.md")


def test_every_command_has_a_heading() -> None:
    commands = {"-".join(path) for path, _ in reference().commands()}
    assert {"shoal-crawl", "shoal-dead-retry"} <= commands <= anchors(ROOT / "docs/reference/cli.md")


def test_every_error_class_is_in_its_table() -> None:
    from shoal.errors import CLASSES

    text = (ROOT / "docs/reference/errors.md").read_text()
    assert [name for name in CLASSES if f"| `{name}` |" not in text] == []


def test_the_list_of_commands_has_the_first_line_of_each_docstring() -> None:
    code = """
from shoal.cli import app, show_docstring
names = [name for name in app if not name.startswith("-")]
listed = {name: app[name].help for name in names}
for name in names:
    show_docstring([name])
assert {name: app[name].help.partition("\\n")[0] for name in names} == listed
assert "Ctrl-C" in app["crawl"].help
"""
    # In a process of its own: commands that another test has run show their docstring already.
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_that_are_named_exist(page: Path) -> None:
    known = {" ".join(path) for path, _ in reference().commands()}
    words = {path[:2] for path, _ in reference().commands()}
    for code in CODE.findall(page.read_text()):
        for command in re.findall(r"(?:^\$ |^`)shoal ([a-z]+)(?: ([a-z]+))?", code, re.MULTILINE):
            assert ("shoal", command[0]) in words, command
            if f"shoal {command[0]} list" in known and command[1]:
                assert f"shoal {command[0]} {command[1]}" in known, command


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_in_the_docs_compiles(page: Path) -> None:
    import ast

    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        # Snippets may await at the top level, as in a notebook.
        compile(block, named(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PROSE, ids=named)
def test_prose_names_its_subjects(page: Path) -> None:
    assert WORST.findall(CODE.sub("", page.read_text())) == [], "see docs/style.md"


def test_every_page_can_be_reached_from_the_index() -> None:
    reached: set[Path] = set()
    todo = [ROOT / "docs/index.md"]
    while todo:
        page = todo.pop()
        reached.add(page)
        for target in LINK.findall(CODE.sub("", page.read_text())):
            to = (page.parent / target.partition("#")[0]).resolve()
            if to.suffix == ".md" and to.exists() and to not in reached:
                todo.append(to)
    assert [named(page) for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in reached] == []
