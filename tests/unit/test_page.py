"""A page as handlers see it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import BadUrl, FetchError, UsageError
from shoal.model import Request, Response
from shoal.scrape.page import HEAVY, HEAVY_TAGS, LIGHT, Page, decode, scrub

HTML = """<!doctype html><html lang="en-GB"><head><title> A
 title </title><meta name=Description content=" Some  words ">
<meta property="og:title" content="OG"><link rel="x canonical" href="/canon#x"></head><body>
<nav><a href="/nav">Navigation</a></nav>
<main><h1>Head <b>line</b></h1><p class="lead big">One<br>two</p>
<ul><li><a href="a.html#x">A</a><li><a href="a.html#y">A again</a>
<li><a href="b?q=1" rel="NoFollow me">B</a></ul>
<map><area href="//o.test/z"></map><a href="mailto:x@y">m</a><a href="#top">t</a><a name=q>no</a></main>
<script>var x = "</p>";</script></body></html>"""


def page_of(
    body: bytes | str = HTML,
    kind: str = "text/html; charset=utf-8",
    url: str = "http://h.test/d/p",
    **request: object,
) -> Page:
    body = body.encode() if isinstance(body, str) else body
    headers = (("content-type", kind),) if kind else ()
    asked = Request(url=url, job="j", **request)  # type: ignore[arg-type]
    return Page(asked, Response(url=url, status=200, headers=headers, body=body, seconds=0.25))


def test_what_it_says() -> None:
    page = page_of(depth=2, label="l", data={"k": 1})
    assert (page.title, page.description, page.language) == ("A title", "Some words", "en-GB")
    assert page.canonical_url == "http://h.test/canon"
    assert page.meta["og:title"] == "OG"
    assert (page.depth, page.label, page.data, page.status) == (2, "l", {"k": 1}, 200)
    assert page.text("h1") == "Head line"
    assert page.text("h9", "none") == "none"
    assert page.texts("li") == ["A", "A again", "B"]
    assert page.attr("p", "class") == "lead big"
    assert page.attr("p", "id", "-") == "-"
    assert "One two" in page.text()
    assert "var x" not in page.text()
    assert page.headers == {"content-type": "text/html; charset=utf-8"}


def test_elements() -> None:
    page = page_of()
    lead = page.css_one("p")
    assert lead is not None
    assert (lead.tag, lead.attr("class"), lead.attr("x", "y")) == ("p", "lead big", "y")
    assert lead.attrs == {"class": "lead big"}
    assert lead.html == '<p class="lead big">One<br>two</p>'
    items = page.css("ul")[0]
    assert [one.text for one in items.css("a")] == ["A", "A again", "B"]
    assert items.xpath(".//a/@href") == ["a.html#x", "a.html#y", "b?q=1"]
    assert items.css_one("h1") is None
    assert page.xpath("//h1")[0].text == "Head line"
    assert page.xpath("//h1/b/text()") == ["line"]
    assert page.xpath("count(//li)") == [3.0]


@pytest.mark.parametrize("selector", ["a[", "", "a::text", "a:nope"])
def test_bad_selector(selector: str) -> None:
    with pytest.raises(UsageError, match="bad CSS selector"):
        page_of().css(selector)
    with pytest.raises(UsageError):
        page_of().css_one(selector)


def test_bad_xpath() -> None:
    with pytest.raises(UsageError, match="bad XPath"):
        page_of().xpath("//[")


def test_links() -> None:
    page = page_of()
    usual = ["http://h.test/nav", "http://h.test/d/a.html", "http://o.test/z"]
    assert page.links() == usual
    assert page.links(nofollow=True) == [*usual[:2], "http://h.test/d/b?q=1", usual[2]]
    assert page.links() == usual


def test_a_link_that_is_also_there_without_nofollow_counts() -> None:
    assert page_of("<a href=x rel=nofollow>a</a><a href=x>b</a>").links() == ["http://h.test/d/x"]


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("<base href=/e/>", "http://h.test/e/x"),
        ("<base><base href='http://o.test/q'><base href=/no/>", "http://o.test/x"),
        ("<base href=javascript:x>", "http://h.test/d/x"),
        ("<base href='http://u:p@o.test/'>", "http://h.test/d/x"),
        ("<base href=''>", "http://h.test/d/x"),
    ],
)
def test_base(base: str, expected: str) -> None:
    assert page_of(f"{base}<a href=x>x</a>").links() == [expected]
    asked_first = page_of(f"{base}<a href=x>x</a>")
    assert asked_first.follow("x").url == expected
    assert asked_first.links() == [expected]


def test_at_most_5000_links() -> None:
    page = page_of("".join(f"<a href={n}>x</a>" for n in range(30_000)))
    assert len(page.links()) == 5000


def test_follow() -> None:
    page = page_of(depth=3, priority=7, queue="q")
    first = page.css("li")[0]
    request = page.follow(first, label="book", data={"n": 1}, delay=2, ttl=9)
    assert request == Request(
        url="http://h.test/d/a.html",
        job="j",
        label="book",
        queue="q",
        priority=7,
        depth=4,
        delay=2,
        ttl=9,
        data={"n": 1},
    )
    assert (
        page.follow("?x", priority=1, method="POST", body=b"b", headers={"a": "b"}).url
        == "http://h.test/d/p?x"
    )
    with pytest.raises(BadUrl):
        page.follow("javascript:x")
    with pytest.raises(BadUrl, match="no link"):
        page.follow(page.css("h1")[0])
    assert [one.url for one in page.follow_all("a, p", label="l")] == [
        "http://h.test/nav", "http://h.test/d/a.html", "http://h.test/d/b?q=1", "http://h.test/d/p",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "kind", "text", "encoding"),
    [
        (b"\xef\xbb\xbf\xc3\xa9", "text/html; charset=latin1", "é", "UTF-8"),
        (b"\xff\xfea\0b", "text/html", "a\ufffd", "UTF-16LE"),
        (b"\xfe\xff\0a", "text/html; charset=utf-8", "a", "UTF-16BE"),
        (b"\xe9", "text/html; charset=ISO-8859-1", "é", "windows-1252"),
        (b"\x80", 'text/html; charset="latin1"', "€", "windows-1252"),
        (b"<meta charset=gb2312>\xc4\xe3", "text/html", "<meta charset=gb2312>你", "GBK"),
        (b"<meta charset=koi8-r>\xc3\xa9", "text/html; charset=utf-8", "<meta charset=koi8-r>é", "UTF-8"),
        (b"<!-- <meta charset=koi8-r> -->\xc3\xa9", "text/html", "<!-- <meta charset=koi8-r> -->é", "UTF-8"),
        (b"<meta charset=utf-16>\xc3\xa9", "text/html", "<meta charset=utf-16>é", "UTF-8"),
        (b"\xc3\xa9", "text/html", "é", "UTF-8"),
        (b"\xe9", "text/html", "é", "windows-1252"),
        (b"\xe9", "text/html; charset=utf8", "\ufffd", "UTF-8"),
        (b"+AGE-", "text/html; charset=utf-7", "+AGE-", "UTF-8"),
        (b"x", "text/html; charset=zlib_codec", "x", "UTF-8"),
        (b"x", "text/html; charset=" + "n" * 5000, "x", "UTF-8"),
        (b"abc", "text/html; charset=iso-2022-kr", "\ufffd", "replacement"),
        (b"a\0b", "text/html", "a\ufffdb", "UTF-8"),
        (b"", "", "", "UTF-8"),
    ],
)
def test_charset(body: bytes, kind: str, text: str, encoding: str) -> None:
    assert decode(body, kind) == (text, encoding)
    assert page_of(body, kind).html == text


LABELS = [
    "",
    "utf-8",
    "utf-16",
    "utf-16be",
    "big5",
    "euc-jp",
    "shift_jis",
    "gb18030",
    "iso-2022-jp",
    "utf-7",
    "\0",
    "x-user-defined",
]


@given(st.binary(max_size=200), st.sampled_from(LABELS))
def test_decoding_never_raises(body: bytes, label: str) -> None:
    text, _ = decode(body, f"text/html; charset={label}")
    assert "\0" not in text
    text.encode()


@given(st.binary(max_size=300))
def test_nothing_raises_on_any_bytes(body: bytes) -> None:
    page = page_of(b"<a href=x " + body, kind="text/html")
    page.links()
    page.markdown()
    page.text()
    assert isinstance(page.title + page.description + page.language + page.canonical_url, str)


def test_scrub() -> None:
    assert scrub("a\0b\ud800c\ud83d\ude00") == "a\ufffdb\ufffdc😀"


def test_not_html() -> None:
    page = page_of(b'{"a": [1]}', "application/json")
    assert not page.is_html
    assert page.css("a") == []
    assert (page.links(), page.title, page.markdown()) == ([], "", "")
    assert page.json() == {"a": [1]}
    with pytest.raises(FetchError) as caught:
        page_of().json()
    assert caught.value.error == "invalid_content"
    with pytest.raises(FetchError):
        page_of("[" * 200_000, "application/json").json()
    assert page_of(b" <!DOCTYPE html><p>", "").is_html
    assert not page_of(b"%PDF-1.7", "").is_html


def test_title_of_a_drawing_is_not_the_title() -> None:
    assert page_of("<body><svg><title>icon</title></svg>").title == ""
    assert page_of("<body><svg><title>icon</title></svg><title>T</title>").title == "T"
    assert page_of("<meta property=og:title content=G>").title == "G"


def test_markdown_keeps_the_main_content() -> None:
    words = "Plenty of words that people came for. " * 10
    text = page_of(f"<nav>menu</nav><main><h1>T</h1><p>{words}</main><footer>imprint</footer>").markdown()
    assert text.startswith("# T")
    assert "menu" not in text
    assert "imprint" not in text
    soup = page_of(f"<div class=navheader>menu</div><header><h1>T</h1></header><p>{words}<aside>ad</aside>")
    assert "# T" in soup.markdown()
    assert "menu" not in soup.markdown()
    assert "menu" in soup.markdown(main=False)
    assert soup.text(".navheader") == "menu"  # the tree itself is untouched


def test_markdown_of_a_page_that_is_all_furniture() -> None:
    assert "only this form" in page_of("<form><p>only this form has text, and a lot of it</form>").markdown()


DOCS = Path("/usr/share/doc/python3.11/html/library")


@pytest.mark.skipif(not DOCS.is_dir(), reason="python3-doc is not installed")
def test_markdown_recall_on_real_pages() -> None:
    for path in sorted(DOCS.glob("*.html"))[::25]:
        page = page_of(path.read_bytes())
        wanted = set(re.findall(r"\w+", page.text("[role=main]")))
        got = set(re.findall(r"\w+", page.markdown().replace("\\", "")))
        assert len(wanted & got) / len(wanted) > 0.95, path.name


@pytest.mark.parametrize(
    "body",
    [
        "<div>" * 200_000,
        "<a " + " ".join(f"x{n}=1" for n in range(100_000)) + ">",
        "<!-- " + "x" * 5_000_000,
        "<table>" * 20_000,
    ],
    ids=["deep", "attributes", "comment", "tables"],
)
def test_hostile_documents_end_soon(body: str) -> None:
    began = time.monotonic()
    page = page_of(body)
    page.links()
    page.markdown()
    assert page.text() is not None
    assert time.monotonic() - began < 5


def test_title_and_description_have_a_limit() -> None:
    long = "word " * 100_000
    page = page_of(f"<title>{long}</title><meta name=description content='{long}'><meta name={long[:9]}>")
    assert len(page.title) == 1000
    assert len(page.description) == 5000
    page = page_of(f"<meta property=og:title content='{long}'>")
    assert len(page.title) == 1000
    assert len(page_of("".join(f"<meta name=a{n} content=x>" for n in range(3000))).meta) == 1000


def test_a_base_with_a_line_break_counts() -> None:
    assert page_of("<base href='/a/\n b/'><a href=c>").links() == ["http://h.test/a/%20b/c"]


@pytest.mark.parametrize(
    ("body", "heavy"),
    [
        (b"<p>" * (LIGHT // 3), False),
        (b"x" * HEAVY, False),
        (b"<p>" * HEAVY_TAGS + b"x" * LIGHT, False),
        (b"<p>" * (HEAVY_TAGS + 1) + b"x" * LIGHT, True),
        (b"x" * (HEAVY + 1), True),
    ],
    ids=["small", "text", "few tags", "many tags", "huge"],
)
def test_a_page_is_heavy_by_its_tags_or_its_size(body: bytes, heavy: bool) -> None:
    assert page_of(body).is_heavy is heavy
