"""Which URLs belong to a job."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.model import JobSpec, Request
from shoal.politeness.scope import MAX_CARRIED, Scope, pattern, registrable


def scope(start: str = "https://shop.example.co.uk/docs/intro?x=/y/", **more: Any) -> Scope:
    return Scope(JobSpec(start=(start,), **more))


@pytest.mark.parametrize(
    ("kind", "url", "reason"),
    [
        ("page", "https://shop.example.co.uk/docs/intro?x=/y/", ""),
        ("page", "https://shop.example.co.uk/docs/intro", "scope"),
        ("prefix", "https://shop.example.co.uk/docs/more/x", ""),
        ("prefix", "https://shop.example.co.uk/docs", "scope"),
        ("prefix", "http://shop.example.co.uk/docs/x", "scope"),
        ("host", "http://shop.example.co.uk/", ""),
        ("host", "http://www.shop.example.co.uk/", ""),
        ("host", "https://shop.example.co.uk:8443/", "scope"),
        ("host", "https://example.co.uk/", "scope"),
        ("domain", "https://example.co.uk:8443/", ""),
        ("domain", "https://a.b.example.co.uk/", ""),
        ("domain", "https://other.co.uk/", "scope"),
        ("domain", "https://example.co.uk.evil.test/", "scope"),
        ("any", "https://other.test/", ""),
    ],
)
def test_kinds(kind: Any, url: str, reason: str) -> None:
    assert scope(scope=kind).refusal(url, 1) == reason


def test_www_start() -> None:
    assert scope("http://www.h.test/").refusal("https://h.test/x", 1) == ""


def test_depth() -> None:
    assert scope(depth=1).refusal("https://shop.example.co.uk/x", 2) == "depth"
    assert scope().refusal("https://shop.example.co.uk/x", 1000) == ""
    assert scope(scope="any").refusal("https://o.test/", 6) == "depth"
    assert scope(scope="domain").refusal("https://example.co.uk/", 5) == ""
    assert scope(scope="any", depth=9).refusal("https://o.test/", 9) == ""
    assert scope(depth=0).refusal("https://shop.example.co.uk/docs/intro?x=/y/", 5) == ""


def test_patterns() -> None:
    narrow = scope(include=("*/blog/*", "/news*"), exclude=(r"re:\.(pdf|zip)$",))
    assert narrow.refusal("https://shop.example.co.uk/blog/x", 1) == ""
    assert narrow.refusal("https://shop.example.co.uk/newsletter", 1) == ""
    assert narrow.refusal("https://shop.example.co.uk/x/news", 1) == "excluded"
    assert narrow.refusal("https://shop.example.co.uk/blog/x.pdf", 1) == "excluded"
    assert narrow.refusal("https://shop.example.co.uk/docs/intro?x=/y/", 1) == ""


@pytest.mark.parametrize(
    ("glob", "url", "fits"),
    [
        ("*", "http://h/", True),
        ("http://h/a", "http://h/a", True),
        ("http://h/a", "http://h/ab", False),
        ("*a*a", "http://h/a", False),
        ("*aa*", "http://h/aa", True),
        ("http://h/*?p=*", "http://h/x?p=1", True),
        ("http://h/*?p=*", "http://h/xxp=1", False),
        ("/a*/b", "http://h:8/a/x/b", True),
        ("*.(x)", "http://h/y.(x)", True),
    ],
)
def test_globs(glob: str, url: str, fits: bool) -> None:
    assert pattern(glob)(url) is fits


def test_globs_are_linear() -> None:
    began = time.monotonic()
    assert not pattern("*a" * 40 + "b")("http://h/" + "a" * 2000)
    assert time.monotonic() - began < 0.5


@pytest.mark.parametrize("bad", ["re:(", "re:*", "", " "])
def test_bad_patterns(bad: str) -> None:
    with pytest.raises(UsageError):
        scope(exclude=(bad,))


def test_trap() -> None:
    assert scope().refusal("https://shop.example.co.uk/a/a/a/a/", 1) == "trap"


def test_admit_start() -> None:
    one = scope("http://example.co.uk/")
    assert one.refusal("https://shop.example.co.uk/x", 1) == "scope"
    assert one.admit_start("https://shop.example.co.uk/home")
    assert one.refusal("https://shop.example.co.uk/x", 1) == ""
    assert not one.admit_start("https://other.co.uk/")
    assert one.refusal("https://other.co.uk/", 1) == "scope"
    page = scope("http://example.co.uk/", scope="page")
    assert page.admit_start("https://www.example.co.uk/")
    assert page.refusal("https://www.example.co.uk/", 0) == ""
    assert page.refusal("https://www.example.co.uk/", 1) == ""


def test_what_a_redirect_admitted_travels_with_requests() -> None:
    start = Request("http://example.co.uk/", "job")
    seen, new = scope(start.url), scope(start.url)
    assert seen.admit_start("https://example.co.uk/")
    assert seen.carried(start) == ()  # the spec says it already
    assert not seen.admit_start("https://other.co.uk/")
    assert seen.carried(start) == ()
    assert seen.admit_start("https://shop.example.co.uk/home")
    assert seen.carried(start) == ("https://shop.example.co.uk/home",)
    for url in seen.carried(start):
        assert new.admit_start(url)
    assert new.refusal("https://shop.example.co.uk/x", 3) == ""
    assert new.carried(start) == seen.carried(start)


def test_a_request_of_many_redirected_starts_carries_its_own() -> None:
    hosts = [f"h{number}.test" for number in range(MAX_CARRIED + 1)]
    many = Scope(JobSpec(start=tuple(f"http://{host}/" for host in hosts)))
    mine = Request("http://h0.test/", "job", starts=("http://shop.h0.test/",))
    for host in hosts[:-1]:
        assert many.admit_start(f"http://shop.{host}/")
    assert len(many.carried(mine)) == MAX_CARRIED
    assert many.admit_start(f"http://shop.{hosts[-1]}/")
    assert many.carried(mine) == mine.starts
    assert many.carried(mine, "http://de.h0.test/") == (*mine.starts, "http://de.h0.test/")


@pytest.mark.parametrize(
    ("host", "domain"),
    [
        ("a.b.example.com", "example.com"),
        ("x.github.io", "x.github.io"),
        ("github.io", "github.io"),
        ("localhost", "localhost"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("www.example.com.", "example.com"),
        ("a.xn--bcher-kva.de", "xn--bcher-kva.de"),
    ],
)
def test_registrable(host: str, domain: str) -> None:
    assert registrable(host) == domain
