"""URLs without end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.politeness.traps import trap


@pytest.mark.parametrize(
    "url",
    [
        "http://h/",
        "http://h/a/b/c",
        "http://h/2011/11/11/x",
        "http://h/a/a/b",
        "http://h/a/b/a/b/c",
        "http://h/" + "/".join(map(str, range(20))),
        "http://h/?" + "&".join(f"p{n}=1" for n in range(24)),
        "http://h/?" + "&".join("id=1" for _ in range(8)),
        "http://h/x?next=/a/a/a/a/a",
    ],
)
def test_fine(url: str) -> None:
    assert trap(url) == ""


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://h/" + "/".join(map(str, range(21))), "segments"),
        ("http://h/x/a/a/a", "repeats"),
        ("http://h/x/a/b/a/b/a/b/y", "repeats"),
        ("http://h/a/b/c/a/b/c/a/b/c", "repeats"),
        ("http://h/en/a/en/b/en/c/en/d/en/e", "occurs"),
        ("http://h/?" + "&".join(f"p{n}=1" for n in range(25)), "parameters"),
        ("http://h/?" + "&".join("id=1" for _ in range(9)), "occurs"),
        ("http://h/?" + "x" * 1025, "query"),
    ],
)
def test_traps(url: str, why: str) -> None:
    assert why in trap(url)


@given(st.text("ab/?&=", max_size=60))
def test_anything(tail: str) -> None:
    assert isinstance(trap(f"http://h/{tail}"), str)
