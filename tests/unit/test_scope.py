"""Which URLs belong to a job."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.model import JobSpec
from shoal.politeness.scope import Scope, pattern, registrable


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
    assert scope(scope=kind).allows(url, 1) == reason


def test_www_start() -> None:
    assert scope("http://www.h.test/").allows("https://h.test/x", 1) == ""


def test_depth() -> None:
    assert scope(depth=1).allows("https://shop.example.co.uk/x", 2) == "depth"
    assert scope().allows("https://shop.example.co.uk/x", 1000) == ""
    assert scope(scope="any").allows("https://o.test/", 6) == "depth"
    assert scope(scope="domain").allows("https://example.co.uk/", 5) == ""
    assert scope(scope="any", depth=9).allows("https://o.test/", 9) == ""
    assert scope(depth=0).allows("https://shop.example.co.uk/docs/intro?x=/y/", 5) == ""


def test_patterns() -> None:
    narrow = scope(include=("*/blog/*", "/news*"), exclude=(r"re:\.(pdf|zip)$",))
    assert narrow.allows("https://shop.example.co.uk/blog/x", 1) == ""
    assert narrow.allows("https://shop.example.co.uk/newsletter", 1) == ""
    assert narrow.allows("https://shop.example.co.uk/x/news", 1) == "excluded"
    assert narrow.allows("https://shop.example.co.uk/blog/x.pdf", 1) == "excluded"
    assert narrow.allows("https://shop.example.co.uk/docs/intro?x=/y/", 1) == ""


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
    assert scope().allows("https://shop.example.co.uk/a/a/a/a/", 1) == "trap"


def test_admit_start() -> None:
    one = scope("http://example.co.uk/")
    assert one.allows("https://shop.example.co.uk/x", 1) == "scope"
    assert one.admit_start("https://shop.example.co.uk/home")
    assert one.allows("https://shop.example.co.uk/x", 1) == ""
    assert not one.admit_start("https://other.co.uk/")
    assert one.allows("https://other.co.uk/", 1) == "scope"
    page = scope("http://example.co.uk/", scope="page")
    assert page.admit_start("https://www.example.co.uk/")
    assert page.allows("https://www.example.co.uk/", 0) == ""


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
