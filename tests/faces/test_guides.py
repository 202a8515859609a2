"""Guides work as typed. `make guides` types all of them, and CI runs it; here is what makes a page fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_guides", ROOT / "scripts/run_guides.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


guides = load()
in_namespaces = pytest.mark.skipif(
    not guides.possible(),
    reason="guides run in namespaces of their own: not root, or no unshare, ip, openssl, curl",
)


@in_namespaces
@pytest.mark.parametrize(
    ("block", "why"),
    [
        (
            "```console\n$ true\n$ shoal status nosuch\n```",
            "line 4: shoal status nosuch\nexit code 2 instead of 0",
        ),
        ("```console\n$ echo 3 pages\n3 pages done\n```", "it did not print: done"),
        ("```python\nraise ValueError(3)\n```", "ValueError: 3"),
        ("```console\n$ shoal worker --job none\n```", "error: no job"),
    ],
)
def test_a_page_that_does_not_work_fails_and_says_where(tmp_path: Path, block: str, why: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n{block}\n")
    code, told = guides.run(page)
    assert code == 1, told
    assert why in told


@in_namespaces
def test_there_is_no_way_out_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    checks = ['test "$(ip -o link | wc -l)" = 1', 'test -z "$(ip route)"', "! getent hosts shoal.example"]
    page.write_text("```console\n" + "".join(f"$ {check}\n" for check in checks) + "```\n")
    code, told = guides.run(page)
    assert code == 0, told
    assert "3 ran" in told


def test_a_page_is_read_from_top_to_bottom() -> None:
    text = """
<!-- run: before: make ready -->
```console
$ shoal crawl https://example.com \\
    --depth 1
pages  12 in 3 s
$ shoal jobs
```
<!-- run: skip: costs money -->
```console
$ shoal buy
```
```text
$ not a command
```
```python
# mine.py
print(1)
```
"""
    found = list(guides.steps(text))
    assert [(step.kind, step.text.split("\n")[0], step.skip, step.file) for step in found] == [
        ("console", "make ready", "", ""),
        ("console", "shoal crawl https://example.com \\", "", ""),
        ("console", "shoal jobs", "", ""),
        ("console", "shoal buy", "costs money", ""),
        ("python", "# mine.py", "", "mine.py"),
    ]
    assert guides.stable_words(found[1].printed) == ["pages", "in", "s"]


@pytest.mark.parametrize("page", guides.PAGES, ids=lambda page: page.name)
def test_every_skip_has_a_reason(page: Path) -> None:
    text = page.read_text()
    assert text.count("<!-- run: ") == text.count("\n<!-- run: "), "one comment a line"
    assert [step for step in guides.steps(text) if step.skip and len(step.skip.split()) < 3] == []
