"""robots.txt as RFC 9309 has it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.politeness.robots import MAX_BYTES, Robots

TEXT = b"""# comment
User-agent: *
Disallow: /private
Allow: /private/open
Disallow: /*.pdf$
Crawl-delay: 2

User-agent: other
User-agent: Shoal
Disallow: /ours
Crawl-delay: 1e9
Sitemap: https://h.test/sitemap.xml
Sitemap: not a url
Sitemap: https://h.test/sitemap.xml
"""


def test_rules() -> None:
    robots = Robots.parse(TEXT, 200)
    assert robots.allowed("http://h.test/private", "shoal")
    assert not robots.allowed("http://h.test/ours/x")
    assert not robots.allowed("http://h.test/private/x", "someone")
    assert robots.allowed("http://h.test/private/open/x", "someone")
    assert not robots.allowed("http://h.test/a.pdf", "someone")
    assert robots.allowed("http://h.test/a.pdf?x", "someone")
    assert robots.allowed("http://h.test/robots.txt")
    assert robots.crawl_delay() == 30.0
    assert robots.crawl_delay("someone") == 2.0
    assert robots.sitemaps() == ["https://h.test/sitemap.xml"]
    assert robots.ttl == 86400


def test_rule_for_people() -> None:
    robots = Robots.parse(TEXT, 200)
    assert robots.rule("http://h.test/ours") == "disallowed by `Disallow: /ours` for user agent shoal"
    assert robots.rule("http://h.test/x") == "allowed: no rule of robots.txt matches"
    assert (
        robots.rule("http://h.test/private/open", "x") == "allowed by `Allow: /private/open` for user agent *"
    )
    assert robots.rule("http://h.test/d/a.pdf", "x") == "disallowed by `Disallow: /*.pdf$` for user agent *"
    assert "no robots.txt" in Robots.parse(b"", 404).rule("http://h.test/")
    assert "503" in Robots.parse(b"", 503).rule("http://h.test/")
    assert "did not answer" in Robots.parse(b"", 0).rule("http://h.test/")
    refused = Robots.load(Robots.unanswered("connect_refused", "cannot connect").dump())
    assert refused.failure == ("connect_refused", "cannot connect")
    assert (refused.reachable, refused.ttl) == (False, 10.0)
    assert "did not answer (connect_refused); asked again in at most 10 s" in refused.rule("http://h.test/")
    assert Robots.parse(b"", 0).failure is None


@pytest.mark.parametrize(
    ("status", "allowed", "ttl"),
    [(200, False, 86400), (204, False, 86400), (301, True, 86400), (401, True, 86400), (403, True, 86400),
     (404, True, 86400), (410, True, 86400), (429, False, 300), (500, False, 300),
     (503, False, 300), (0, False, 300)],
)  # fmt: skip
def test_status(status: int, allowed: bool, ttl: float) -> None:
    robots = Robots.parse(b"User-agent: *\nDisallow: /", status)
    assert robots.allowed("http://h.test/x") is allowed
    assert robots.ttl == ttl
    assert Robots.load(robots.dump()).allowed("http://h.test/x") is allowed
    assert Robots.load(robots.dump()).status == status


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbfUser-agent: *\nDisallow: /x",
        "\ufeffUser-agent: *\nDisallow: /x".encode("utf-16-le"),
        b"User-agent: *\r\nDisallow: /x\r\n",
        b"USER-AGENT:SHOAL\nDISALLOW:/x",
        b"\xff\xfeU\0s\0e\0r\0-\0a\0g\0e\0n\0t\0:\0*\0\n\0D\0i\0s\0a\0l\0l\0o\0w\0:\0/\0x\0",
    ],
)
def test_forms(text: bytes) -> None:
    robots = Robots.parse(text, 200)
    assert not robots.allowed("http://h.test/x")
    assert robots.allowed("http://h.test/y")


@pytest.mark.parametrize(
    ("line", "delay"),
    [(b"Crawl-delay: 0.5", 0.5), (b"Crawl-delay: -1", None), (b"Crawl-delay: nan", None),
     (b"Crawl-delay: 0", None), (b"Crawl-delay: x", None), (b"Crawl-delay: inf", None),
     (b"Request-rate: 1/10", 10.0), (b"", None)],
)  # fmt: skip
def test_crawl_delay(line: bytes, delay: float | None) -> None:
    assert Robots.parse(b"User-agent: *\n" + line, 200).crawl_delay() == delay


def test_html_instead() -> None:
    assert Robots.parse(b"<!doctype html><title>Not found</title>", 200).allowed("http://h.test/x")


def test_long_files_are_cut_at_a_line() -> None:
    line = b"Disallow: /" + b"a" * 88 + b"\n"
    text = b"User-agent: *\n" + line * (MAX_BYTES // len(line)) + b"Disallow: /private\n"
    robots = Robots.parse(text, 200)
    assert robots.allowed("http://h.test/p")
    assert robots.allowed("http://h.test/private")
    assert Robots.slow(text)
    assert not Robots.slow(TEXT)


def test_many_wildcards_end_soon() -> None:
    text = b"User-agent: *\n" + b"".join(b"Disallow: /*a*b*%d*c$\n" % n for n in range(20_000))
    began = time.process_time()  # CPU, not the clock: other tests run at the same time
    assert Robots.parse(text, 200).allowed("http://h.test/" + "ab" * 500)
    assert time.process_time() - began < 5


@given(st.binary(max_size=200))
def test_anything_parses(text: bytes) -> None:
    robots = Robots.parse(b"User-agent: *\n" + text, 200)
    assert robots.allowed("http://h.test/x") in (True, False)
    assert robots.rule("http://h.test/x")
    robots.crawl_delay()
    robots.sitemaps()
    Robots.load(robots.dump())


def test_load_refuses_garbage() -> None:
    with pytest.raises(ValueError):
        Robots.load(b"garbage")
