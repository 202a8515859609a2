"""Hrefs become canonical URLs: fast, and exactly as the slow way would do it."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import urls
from shoal.errors import BadUrl
from shoal.scrape import links
from shoal.scrape.links import MAX_LINKS, Links, canonical_href

BASES = (
    "http://h.test/",
    "http://h.test/a/b/c.html?q=/x/y",
    "https://h.test:8443/a/",
    "http://h.test/a//b/../c",
)
HREFS = (
    *(
        "x",
        "x.html",
        "../x",
        "../../a/b-c.d/",
        "a.b/~c_d.html",
        "a/../x",
        "a/.b",
        "..x",
        "../../../x",
        "/x",
        "//o.test/x",
        "//u@o.test/",
        "///o.test",
        "/",
        ".",
        "..",
        "./",
    ),
    *(
        "?a=1",
        " ?a=1",
        "\x01?a=1",
        "ht\ntp:?a=1",
        "/\n/o.test/x",
        "a\nb",
        "",
        " ",
        "#x",
        " #x",
        "x#y",
        "http:",
        "http:?x",
        "https:?x",
        "http:x",
        "HTTP:/x",
        "https:/x",
    ),
    *(
        "http://O.test:80/a/../b",
        "https://o.test",
        "http://o.test:0/",
        "http://u:p@o.test/",
        "http://o.test/#f",
    ),
    *(
        "javascript:x()",
        "JavaScript:x()",
        "mailto:a@b",
        "data:,x",
        "tel:1",
        "ftp://h/x",
        "file:///etc/passwd",
    ),
    *(
        "my file.pdf",
        " x ",
        "\tx\n",
        "a\nb",
        "a\0b",
        "a\\b",
        "\\\\o.test\\x",
        "%zz",
        "é",
        "x?y#z?w",
        "a:b",
        "a/b:c",
    ),
    *(
        "x" * 3000,
        "/" + "x" * 2070,
        "http://[::1]/",
        "http://[bad/",
        "//",
        "/\\o.test/",
        "x;y=1,2",
        "@",
        "a@b",
        "|",
    ),
    *(
        "http://xn--a/",
        "http://127.1/",
        "*",
        "&",
        "..%2f",
        "%2e%2e/x",
        "/..//x",
        "x//y",
        ":",
        "1:2",
        "\ud800",
        "http://",
    ),
)
href_text = st.text(st.sampled_from(list(string.printable + "é\0\ud800")), max_size=30)


def slowly(base: str, hrefs: list[str]) -> list[str]:
    found: dict[str, None] = {}
    for href in hrefs:
        text = href.partition("#")[0].strip("".join(map(chr, range(33))))
        text = "".join(c if "!" <= c != "\x7f" else f"%{ord(c):02X}" for c in text if c not in "\t\r\n")
        try:
            found[urls.canonical(text, base=base)] = None
        except BadUrl:
            continue
    return list(found)


def test_equals_the_policy_for_every_kind_of_href() -> None:
    shared = Links()
    for _ in range(2):
        for base in map(urls.canonical, BASES):
            assert Links().resolve(base, HREFS) == slowly(base, list(HREFS))
            assert shared.resolve(base, HREFS) == slowly(base, list(HREFS))
            for href in HREFS:
                assert shared.resolve(base, [href]) == slowly(base, [href]), href


@given(st.lists(st.one_of(href_text, st.sampled_from(HREFS)), max_size=8), st.sampled_from(BASES))
def test_equals_the_policy_for_anything(hrefs: list[str], base: str) -> None:
    base = urls.canonical(base)
    shared = Links()
    shared.resolve("http://h.test/a/b/other.html", hrefs)
    assert shared.resolve(base, hrefs) == slowly(base, hrefs)


def test_a_query_link_means_its_own_page() -> None:
    memory = Links()
    assert memory.resolve("http://h.test/a/one", ["?p=2"]) == ["http://h.test/a/one?p=2"]
    assert memory.resolve("http://h.test/a/two", ["?p=2"]) == ["http://h.test/a/two?p=2"]


def test_at_most_so_many() -> None:
    found = Links().resolve("http://h.test/", [str(n) for n in range(MAX_LINKS + 100)])
    assert len(found) == MAX_LINKS
    assert found[0] == "http://h.test/0"


def test_memory_is_bounded() -> None:
    memory = Links()
    for page in range(120):
        memory.resolve(
            f"http://h.test/{page}/",
            [f"{page}-{n}" for n in range(600)] + [f"/{page}-{n}" for n in range(600)],
        )
    held = sum(map(len, memory._directories.values())) + sum(map(len, memory._origins.values()))
    assert held <= links.MAX_REMEMBERED + 1200


def test_spaces_are_kept_as_browsers_do() -> None:
    assert canonical_href("my file.pdf#a b", "http://h.test/x/") == "http://h.test/x/my%20file.pdf"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("/a\nb", "/ab"),
        ("/a/\r\n\t\tb?q=1\n&r=2", "/a/b?q=1&r=2"),
        ("\n  /blanks \t\n", "/blanks"),
        ("ht\ntp://h.test/scheme", "/scheme"),
        ("http://h.\ntest/host", "/host"),
        ("\x01\x1f/control at the ends\x02", "/control%20at%20the%20ends"),
        ("/control\x01inside\x7f", "/control%01inside%7F"),
        ("\\back\\slash", "/back/slash"),
    ],
)
def test_line_breaks_and_blanks_are_read_as_browsers_do(written: str, meant: str) -> None:
    assert Links().resolve("http://h.test/", [written]) == [f"http://h.test{meant}"]
    assert canonical_href(written, "http://h.test/") == f"http://h.test{meant}"


def test_a_line_break_hides_no_scheme() -> None:
    assert (
        Links().resolve("http://h.test/", ["java\nscript:x()", "\x01data:,x", "ht\ttp://u:p@h.test/"]) == []
    )


def test_long_hrefs_are_not_remembered_for_long() -> None:
    memory = Links()
    for page in range(40):
        memory.resolve("http://h.test/", [f"{page}-{n}-".ljust(8000, "x") for n in range(1250)])
    held = sum(len(href) for known in memory._directories.values() for href in known)
    assert held < 20_000_000
