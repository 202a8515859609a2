"""What we accept as a URL, and the one form in which we keep it."""

from __future__ import annotations

import string

import ada_url
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal import urls
from shoal.errors import BadUrl

odd = st.text(st.sampled_from(list(string.printable + "\0\x7f\ud800\udffféß中\u202e。％#@\\[]")), max_size=40)
hosts = st.one_of(
    st.sampled_from(["example.com", "EXAMPLE.com.", "bücher.de", "127.1", "0x7f.1", "[::1]", "xn--a", "a_b"]),
    odd,
)
built = st.builds(
    lambda scheme, host, port, tail: f"{scheme}{host}{port}{tail}",
    st.sampled_from(["http://", "https://", "HTTP:", "http:/", "http:///", "//", "", "ftp://"]),
    hosts,
    st.sampled_from(["", ":80", ":443", ":8080", ":0", ":99999", ":x"]),
    odd,
)


@given(st.one_of(odd, built), st.sampled_from([None, "http://h/a/b?c", "https://h/", "junk", "\ud800"]))
@example("http://h/\ud800", None)
def test_canonical_raises_only_bad_url_and_is_idempotent(text: str, base: str | None) -> None:
    try:
        url = urls.canonical(text, base=base)
    except BadUrl as error:
        assert error.error in ("url_invalid", "url_too_long", "url_userinfo", "scheme_blocked")
        return
    assert urls.canonical(url) == url
    assert url.startswith(("http://", "https://"))
    assert "#" not in url
    assert url.startswith(urls.origin_of(url))
    assert urls.lane_of(url)
    assert urls.host_of(url)
    assert len(urls.key("j", url)) == 16


@pytest.mark.parametrize(
    ("given_url", "kept"),
    [
        ("HTTP://Example.COM:80/a/../b#c", "http://example.com/b"),
        ("  https://example.com  ", "https://example.com/"),
        ("http://127.1/", "http://127.0.0.1/"),
        ("http://0x7f.1/", "http://127.0.0.1/"),
        ("http:/x.test", "http://x.test/"),
        ("http:///x.test", "http://x.test/"),
        ("http://bücher.de/ü?ü", "http://xn--bcher-kva.de/%C3%BC?%C3%BC"),
        ("http://[::1]:8080/", "http://[::1]:8080/"),
    ],
)
def test_canonical(given_url: str, kept: str) -> None:
    assert urls.canonical(given_url) == kept


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("", "url_invalid"),
        ("example.com", "url_invalid"),
        ("localhost:8000/x", "url_invalid"),
        ("ftp://x.test/", "scheme_blocked"),
        ("javascript:alert(1)", "scheme_blocked"),
        ("http://user:pw@x.test/", "url_userinfo"),
        ("http://x.test:0/", "url_invalid"),
        ("http://x.test:99999/", "url_invalid"),
        ("http://x.test/a\r\nHost: b", "url_invalid"),
        ("http://x.test/\0", "url_invalid"),
        ("http://x.test/" + "a" * 2083, "url_too_long"),
        ("http://x.test/" + "a" * 2_000_000, "url_too_long"),
    ],
)
def test_refused(url: str, error: str) -> None:
    with pytest.raises(BadUrl) as caught:
        urls.canonical(url)
    assert caught.value.error == error


def test_parts() -> None:
    assert urls.lane_of("https://h.test:8443/x") == "h.test:8443"
    assert urls.host_of("https://h.test:8443/x") == "h.test"
    assert urls.host_of("http://[::1]:80/x") == "::1"
    assert urls.origin_of("https://h.test:8443/x?y") == "https://h.test:8443"


def test_keys_of_one_host_sort_together_and_differ_by_method() -> None:
    one, two = urls.key("j", "http://h/1"), urls.key("j", "http://h/2")
    assert one != two
    assert one[:4] == two[:4]
    assert urls.key("k", "http://h/1") != one
    assert urls.key("j", "http://h/1", "POST", b"x") != one


NEAR = st.text("ab0-.:/?#@%&=+~!*'(),;$_\\^|`{}<>\" XxNn2eEäß。", max_size=30)


@given(
    st.one_of(
        st.from_regex(urls._PLAIN, fullmatch=True), st.builds("https://{}.example/{}".format, NEAR, NEAR)
    )
)
@example("https://h.example/a/../b")
@example("https://h.example/a/.")
@example("https://h.example/.hidden")
@example("https://h.example/a?b=/../c")
@example("https://xn--a.example/")
@example("https://h.example/%2e%2e/b")
@example("https://h.example/?q=%2e'")
def test_what_is_seen_at_a_glance_is_what_the_parser_says(url: str) -> None:
    if urls._is_canonical(url):
        assert urls.check(ada_url.normalize_url(url), url) == url


def test_most_of_a_list_is_seen_at_a_glance() -> None:
    for url in (
        "https://example.com/",
        "http://www.example.co.uk/a/b-c_d.html?x=1&y=%20",
        "https://a.example/a.b/c.",
    ):
        assert urls._is_canonical(url)
    for url in (
        "https://h.example",
        "https://H.example/",
        "https://h.example/#f",
        "https://127.0.0.1/",
        "http://h/",
    ):
        assert not urls._is_canonical(url)
