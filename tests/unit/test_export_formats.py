"""Choosing a format, and the Markdown directory."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ExportError, UsageError
from shoal.export.csv import Csv
from shoal.export.formats import ENDINGS, exporter_for
from shoal.export.jsonl import JsonArray, JsonLines
from shoal.export.markdown import SEGMENT, Markdown, name_of
from shoal.model import Item


@pytest.mark.parametrize(
    ("out", "kind"),
    [
        ("a.jsonl", JsonLines), ("A.NDJSON", JsonLines), ("a.json", JsonArray), ("x/a.csv", Csv),
        ("site.md/", Markdown), ("pages/", Markdown), ("a.csv/", Markdown),
    ],
)  # fmt: skip
def test_the_ending_chooses(out: str, kind: type) -> None:
    assert type(exporter_for(out, "j")) is kind


@pytest.mark.parametrize("out", ["a.orc", "a.md", "a", "", ".", "a.jsonl.gz", "a.xlsx"])
def test_other_endings_are_refused_with_a_list(out: str) -> None:
    with pytest.raises(UsageError) as refused:
        exporter_for(out, "j")
    assert all(ending in refused.value.hint for ending in ENDINGS)


def item(seq: int, **fields: Any) -> Item:
    return Item(seq, json.dumps(fields).encode())


def export(root: Path, items: list[Item], job: str = "j") -> None:
    exporter = Markdown(root, job)
    at = exporter.open(0)
    exporter.write([one for one in items if one.seq > at])
    exporter.finish()


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://a.org/", "a.org/index.md"),
        ("https://a.org", "a.org/index.md"),
        ("https://a.org/docs/", "a.org/docs/index.md"),
        ("https://a.org/docs/intro", "a.org/docs/intro.md"),
        ("https://a.org/x.html", "a.org/x.html.md"),
        ("https://a.org/caf%C3%A9", "a.org/café.md"),
        ("http://a.org/x", "a.org~80/x.md"),
        ("http://127.0.0.1:8000/x", "127.0.0.1~8000/x.md"),
    ],
)
def test_plain_urls_have_plain_names(url: str, name: str) -> None:
    assert name_of(url) == PurePosixPath(name)


@pytest.mark.parametrize(
    "path",
    [
        "a?b=1", "docs/index", "~me", "..%2f..%2fetc%2fpasswd", "%2e%2e/x", "%252e%252e/x", "a//b", "x.md/y",
        "caf%c3%a9", "%41", ".hidden", "..", "../../x", "a%00b", "con%5C..%5Cx", "-rf", "x" * 500,
        "%F0%9F%90%9F" * 99, "a/%E4%BD%A0" + "%E5%A5%BD" * 80,
    ],
)  # fmt: skip
def test_odd_urls_get_a_hash_and_stay_inside(path: str, tmp_path: Path) -> None:
    name = name_of(f"https://a.org/{path}")
    assert name is not None
    assert "~" in name.name
    assert (tmp_path / name).resolve().is_relative_to((tmp_path / "a.org").resolve())
    assert all(len(part.encode()) <= SEGMENT and not part.startswith(".") for part in name.parts)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).touch()


def test_what_is_no_url_has_no_name() -> None:
    for text in ("", "x", "ftp://a/b", "http://", "https://[::1", "https://./"):
        assert name_of(text) is None
    assert name_of("http://[::1]:80/a") is not None


@given(
    st.lists(
        st.text(st.sampled_from("abAB./~-_%2Ee41?# é\0\\"), max_size=12), min_size=2, max_size=12, unique=True
    )
)
def test_different_urls_have_different_names(paths: list[str]) -> None:
    urls = {f"https://a.org/{path}" for path in paths}
    names = [name_of(url) for url in urls]
    whole = {str(name) for name in names if name}
    assert len(whole) == len(urls)
    folders = {str(parent) for name in names if name for parent in name.parents}
    assert not whole & folders, "no name is a file and a directory at once"


def test_a_directory_of_pages(tmp_path: Path) -> None:
    root = tmp_path / "new" / "site.md"
    export(
        root,
        [
            item(
                1,
                url="https://a.org/",
                title='Home: "a" [b]\n*c*',
                text="# Hi\n\nthere\n",
                links=["x"],
                depth=0,
            ),
            item(2, url="https://a.org/b", title=None, markdown="**b**", text="b", tags=["é", 1], no=True),
            item(3, price=3),
            Item(4, b"[1,2]"),
        ],
    )
    assert files(root) == [
        "a.org/b.md",
        "a.org/index.md",
        "index.md",
        "~items/000000003.md",
        "~items/000000004.md",
    ]
    assert (root / "a.org/index.md").read_text() == (
        '---\nshoal: "j/1"\nurl: "https://a.org/"\ntitle: "Home: \\"a\\" [b]\\n*c*"\ndepth: 0\n---\n'
        "\n# Hi\n\nthere\n"
    )
    assert (root / "a.org/b.md").read_text() == (
        '---\nshoal: "j/2"\nurl: "https://a.org/b"\ntags: ["é",1]\n"no": true\n---\n\n**b**\n'
    )
    assert (root / "index.md").read_text() == (
        '# Index\n\n- [Home: "a" \\[b\\] \\*c\\*](a.org/index.md)\n- [https://a.org/b](a.org/b.md)\n'
        "- [\\~items/000000003.md](~items/000000003.md)\n- [\\~items/000000004.md](~items/000000004.md)\n"
    ).replace("\\~", "~")


def test_several_items_of_one_page_each_have_a_file_and_twice_is_harmless(tmp_path: Path) -> None:
    items = [item(n, url="https://a.org/list", text=str(n)) for n in (1, 2, 3)]
    export(tmp_path, items)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    assert len(before) == 4
    export(tmp_path, items)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before
    export(tmp_path, [item(9, url="https://a.org/list", text="newer crawl")], job="k")
    assert b"newer crawl" in (tmp_path / "a.org/list.md").read_bytes()


def test_a_stopped_export_goes_on(tmp_path: Path) -> None:
    items = [item(n, url=f"https://a.org/{n}", title=str(n)) for n in range(1, 7)]
    first = Markdown(tmp_path, "j")
    first.open(0)
    first.write(items[:3])
    first.close()
    assert json.loads((tmp_path / ".shoal-cursor").read_bytes())["seq"] == 3
    with (tmp_path / ".shoal-index").open("ab") as index:
        index.write(b"- [torn")
    export(tmp_path, items)
    assert files(tmp_path) == sorted([*(f"a.org/{n}.md" for n in range(1, 7)), "index.md"])
    lines = (tmp_path / "index.md").read_text().splitlines()[2:]
    assert lines == [f"- [{n}](a.org/{n}.md)" for n in range(1, 7)]


def test_an_empty_directory_has_an_index(tmp_path: Path) -> None:
    export(tmp_path / "d", [])
    assert files(tmp_path / "d") == ["index.md"]


def test_two_exports_into_one_directory(tmp_path: Path) -> None:
    first = Markdown(tmp_path, "j")
    first.open(0)
    with pytest.raises(ExportError, match="another process"):
        Markdown(tmp_path, "j").open(0)
    first.close()
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way_is_an_export_error(tmp_path: Path) -> None:
    (tmp_path / "a.org").write_text("in the way")
    exporter = Markdown(tmp_path, "j")
    exporter.open(0)
    with pytest.raises(ExportError, match="cannot write") as refused:
        exporter.write([item(1, url="https://a.org/x")])
    assert refused.value.hint
    exporter.close()
