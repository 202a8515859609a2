"""robots.txt as RFC 9309 has it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.politeness.robots import MAX_BYTES, Robots, agent_of

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


@pytest.mark.parametrize(
    ("status", "allowed", "ttl"),
    [(200, False, 86400), (204, False, 86400), (301, True, 86400), (401, True, 86400), (403, True, 86400),
     (404, True, 86400), (410, True, 86400), (429, False, 300), (500, False, 300),
     (503, False, 300)],
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
        b"User-agent: *\rDisallow: /x\r",
        b"U\0s\0e\0r\0-\0a\0g\0e\0n\0t\0:\0*\0\n\0D\0i\0s\0a\0l\0l\0o\0w\0:\0/\0x\0",
        b"User-agent: *\nDisallow: /x\0\n",
        b"User agent *\n\n \t Dissallow /x # and why",
        b"User-agent: *\nDisallow: /\xff\nDisallow: /x",
        b"User-agent: *\n" + b"x" * 100_000 + b": /y\nDisallow: /x\n",
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
     (b"Crawl-delay: 1e999", 30.0), (b"Crawl-delay: " + b"9" * 500_000, 30.0), (b"Crawl-delay:", None),
     (b"Crawl-delay: 1\nCrawl-delay: 3\nCrawl-delay: 2", 3.0), (b"Crawl-delay: 5 s", None),
     (b"Request-rate: 1/10", 10.0), (b"Request-rate: 6/1m", 10.0), (b"Request-rate: 0/0", None),
     (b"Request-rate: 1/" + b"9" * 999, 30.0), (b"", None)],
)  # fmt: skip
def test_crawl_delay(line: bytes, delay: float | None) -> None:
    assert Robots.parse(b"User-agent: *\n" + line, 200).crawl_delay() == delay


@pytest.mark.parametrize(
    ("named", "us"),
    [
        ("shoal", True),
        ("SHOAL", True),
        ("shoal/0.1.0", True),
        ("shoal 0.1", True),
        ("sho", False),
        ("shoals", False),
        ("shoal-news", False),
        ("myshoal", False),
        ("s", False),
        ("Mozilla/5.0 (compatible; shoal/1.0)", False),
        ("*shoal", False),
        ("", False),
    ],
)
def test_who_is_meant(named: str, us: bool) -> None:
    text = f"User-agent: {named}\nDisallow: /x\nCrawl-delay: 7\nUser-agent: *\nDisallow: /y\nCrawl-delay: 3\n"
    robots = Robots.parse(text.encode(), 200)
    assert robots.allowed("http://h.test/x") is not us
    assert robots.allowed("http://h.test/y") is us
    assert robots.crawl_delay() == (7.0 if us else 3.0)
    assert ("for user agent shoal" in robots.rule("http://h.test/x")) is us


def test_groups_of_one_name_are_one() -> None:
    text = b"""User-agent: shoal
Disallow: /a
User-agent: *
Disallow: /everybody
User-agent: other
Sitemap: https://h.test/s.xml
User-agent: shoal/2
Disallow: /b
Allow: /a/open
User-agent: shoal
"""
    robots = Robots.parse(text, 200)
    answers = [robots.allowed(f"http://h.test{path}") for path in ("/a", "/b", "/a/open", "/everybody")]
    assert answers == [False, False, True, True]
    assert not robots.allowed("http://h.test/b", "other"), "a sitemap does not part the names of a group"


def test_a_group_without_rules_allows_everything() -> None:
    robots = Robots.parse(b"User-agent: *\nDisallow: /\n\nUser-agent: shoal\nDisallow:\n", 200)
    assert robots.allowed("http://h.test/x")
    assert not robots.allowed("http://h.test/x", "other")
    assert not robots.allowed("http://h.test/x", ""), "who has no name is everybody"


@pytest.mark.parametrize(
    ("user_agent", "token"),
    [
        ("acmebot/1.0", "acmebot"),
        ("AcmeBot", "acmebot"),
        ("acme-research (+https://acme.example/bot)", "acme-research"),
        ("Mozilla/5.0 (compatible; acmebot/1.0; +https://acme.example)", "acmebot"),
        (
            "Mozilla/5.0 AppleWebKit/537.36 (KHTML, like Gecko; compatible; Acme_Bot/2.1)",
            "acme_bot",
        ),
        ("Mozilla/5.0 (compatible; +https://acme.example/bot)", "mozilla"),
        ("Mozilla/5.0 (compatible; https://acme.example/bot)", "mozilla"),
        ("Mozilla/5.0 (X11; Linux x86_64) Firefox/99.0", "mozilla"),
        ("acmebot/1.0 (compatible; MSIE 6.0)", "acmebot"),
        ("1", ""),
    ],
)
def test_our_name(user_agent: str, token: str) -> None:
    assert agent_of(user_agent) == token


@pytest.mark.parametrize(
    ("rule", "path", "fits"),
    [
        ("/a", "/ab", True),
        ("/a$", "/a", True),
        ("/a$", "/ab", False),
        ("/a*c", "/abbbcd", True),
        ("/a*c$", "/abccd", False),
        ("/*?", "/x?y", True),
        ("/*?", "/x", False),
        ("*", "/x", True),
        ("/**a***b", "/1a2b3", True),
        ("/%7Ejoe", "/~joe/x", True),
        ("/~joe", "/%7ejoe", True),
        ("/\u00e4", "/%c3%a4", True),
        ("/%E3%83%84", "/\u30c4", True),
        ("/a%2Fb", "/a/b", False),
        ("/a%2fb", "/a%2Fb", True),
        ("/x?u=http://a.b", "/x?u=http%3A//a.b", True),
        ("/*%20", "/a%20b", True),
        ("/*%", "/a%20b", True),
        ("/*%", "/100%25", True),
        ("/a%2a", "/a*", True),
        ("/a%2a", "/ab", False),
        ("/a%24", "/a$", True),
        ("/private page", "/private%20page", True),
        ("a", "/a", False),
        ("/" + "a" * 9999, "/" + "a" * 99, False),
    ],
)
def test_patterns(rule: str, path: str, fits: bool) -> None:
    robots = Robots.parse(f"User-agent: *\nDisallow: {rule}".encode(), 200)
    assert robots.allowed(f"http://h.test{path}") is not fits


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        ("Disallow: /a\nAllow: /a", True),
        ("Allow: /a\nDisallow: /ab", False),
        ("Allow: /ab\nDisallow: /a*", True),
        ("Disallow: /a*c\nAllow: /abc", True),
        ("Disallow: /*c\nAllow: /a", False),
        ("Disallow: /abc$\nAllow: /abc", False),
        ("Allow: /$\nDisallow: /", False),
    ],
)
def test_the_longest_rule_wins_and_of_two_as_long_the_one_that_allows(rules: str, allowed: bool) -> None:
    robots = Robots.parse(f"User-agent: *\n{rules}\n".encode(), 200)
    assert robots.allowed("http://h.test/abc") is allowed
    assert robots.rule("http://h.test/abc").startswith("allowed" if allowed else "disallowed")


def test_who_may_see_the_index_may_see_its_folder() -> None:
    robots = Robots.parse(b"User-agent: *\nDisallow: /\nAllow: /index.html\n", 200)
    assert robots.allowed("http://h.test/")
    assert not robots.allowed("http://h.test/x")


def test_html_instead() -> None:
    assert Robots.parse(b"<!doctype html><title>Not found</title>", 200).allowed("http://h.test/x")


def test_long_files_are_cut_at_a_line() -> None:
    line = b"Disallow: /" + b"a" * 88 + b"\n"
    text = b"User-agent: *\n" + line * (MAX_BYTES // len(line)) + b"Disallow: /private\n"
    robots = Robots.parse(text[:-4], 200)
    assert robots.allowed("http://h.test/p")
    assert robots.allowed("http://h.test/private")
    assert not robots.allowed("http://h.test/" + "a" * 88)
    assert Robots.is_slow(text)
    assert not Robots.is_slow(TEXT)


@pytest.mark.parametrize(
    "line",
    ["Disallow: /*z{0}", "Disallow: /*a*b*{0}*c$", "Disallow: /" + "*a" * 500 + "z{0}", "Disallow: /{0}"],
)
def test_a_megabyte_of_rules_ends_soon(line: str) -> None:
    lines = (line.format(n) for n in range(100_000))
    text = "\n".join(["User-agent: *", *lines]).encode()
    began = time.process_time()  # CPU, not the clock: other tests run at the same time
    robots = Robots.parse(text, 200)
    robots.group()
    read = time.process_time()
    assert robots.allowed("http://h.test/" + "ab" * 1000)
    assert read - began < 3
    assert time.process_time() - read < 1
    assert robots.group().is_slow or "*" not in line, "asking belongs on a thread"


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
