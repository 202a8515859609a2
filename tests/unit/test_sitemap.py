"""Sitemaps and lists as sites really have them, and as nobody should."""

from __future__ import annotations

import gzip
import time
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.discover.entry import Child, Entry, moment, parse_since
from shoal.discover.reader import Reader
from shoal.errors import UsageError
from shoal.urls import canonical

HERE = "http://site.test/maps/sitemap.xml"
NS = "http://www.sitemaps.org/schemas/sitemap/0.9"


def read(
    data: bytes, step: int = 64 * 1024, *, url: str = HERE, max_bytes: int = 50 << 20, max_urls: int = 50_000
) -> tuple[Reader, list[Entry | Child]]:
    reader = Reader(url, max_bytes=max_bytes, max_urls=max_urls, images=True)
    found: list[Entry | Child] = []
    for at in range(0, len(data), step):
        found += reader.feed(data[at : at + step])
    return reader, found + reader.close()


def urlset(*locs: str, head: str = '<?xml version="1.0" encoding="UTF-8"?>') -> bytes:
    urls = "".join(f"<url><loc>{loc}</loc></url>" for loc in locs)
    return f'{head}<urlset xmlns="{NS}">{urls}</urlset>'.encode()


def urls_in(data: bytes) -> list[str]:
    return [one.url for one in read(data)[1]]


def test_a_sitemap_by_the_book() -> None:
    data = f"""<?xml version="1.0" encoding="UTF-8"?>
    <urlset xmlns="{NS}">
      <url><loc>http://site.test/a?x=1&amp;y=2</loc><lastmod>2026-03-04T05:06:07+02:00</lastmod>
           <changefreq>daily</changefreq><priority>0.8</priority></url>
      <url><loc>http://site.test/b</loc><lastmod>2026-03</lastmod></url>
      <url><loc>http://site.test/c</loc></url>
    </urlset>""".encode()
    reader, found = read(data)
    assert (reader.kind, reader.trouble, reader.bad) == ("sitemap", "", 0)
    assert [(one.url, one.lastmod) for one in found if isinstance(one, Entry)] == [
        ("http://site.test/a?x=1&y=2", "2026-03-04T03:06:07Z"),
        ("http://site.test/b", "2026-03"),
        ("http://site.test/c", None),
    ]


def test_a_sitemap_names_whole_urls() -> None:
    reader, found = read(
        urlset("not a url", " http://site.test/a b ", "/c", "//site.test/d", "e", "HTTPS://x.test")
    )
    assert [one.url for one in found] == ["http://site.test/a%20b", "https://x.test/"]
    assert reader.bad == 4


def test_an_index_names_files() -> None:
    data = f"""<sitemapindex xmlns="{NS}">
      <sitemap><loc>http://site.test/one.xml.gz</loc><lastmod>2026-01-02</lastmod></sitemap>
      <sitemap><loc>http://site.test/maps/two.xml</loc></sitemap></sitemapindex>""".encode()
    reader, found = read(data)
    assert reader.kind == "index"
    assert found == [
        Child("http://site.test/one.xml.gz", moment("2026-01-02")),
        Child("http://site.test/maps/two.xml"),
    ]


def test_news_and_images_are_told_and_not_mistaken_for_pages() -> None:
    data = f"""<urlset xmlns="{NS}" xmlns:news="http://www.google.com/schemas/sitemap-news/0.9"
        xmlns:image="http://www.google.com/schemas/sitemap-image/1.1"
        xmlns:video="http://www.google.com/schemas/sitemap-video/1.1"><url>
      <image:image><image:loc>https://cdn.test/1.png</image:loc></image:image>
      <image:image><image:loc>javascript:alert(1)</image:loc></image:image>
      <video:video><video:content_loc>http://site.test/v.mp4</video:content_loc></video:video>
      <loc>http://site.test/story</loc>
      <news:news><news:publication><news:name>The Tide</news:name></news:publication>
        <news:publication_date>2026-05-06T07:08Z</news:publication_date><news:title>x</news:title></news:news>
    </url></urlset>""".encode()
    (entry,) = read(data)[1]
    assert isinstance(entry, Entry)
    assert entry.document() == {
        "url": "http://site.test/story",
        "lastmod": "2026-05-06T07:08:00Z",
        "source": HERE,
        "published": "2026-05-06T07:08:00Z",
        "images": ["https://cdn.test/1.png"],
    }


@pytest.mark.parametrize(
    "data",
    [
        urlset("http://site.test/é"),
        b"\xef\xbb\xbf" + urlset("http://site.test/é"),
        b"\r\n  " + urlset("http://site.test/é"),
        urlset("http://site.test/é", head="").replace("é".encode(), b"\xe9"),
        urlset("http://site.test/é", head='<?xml version="1.0" encoding="ISO-8859-1"?>').replace(
            "é".encode(), b"\xe9"
        ),
        urlset("http://site.test/é").decode().encode("utf-16"),
        urlset("http://site.test/é").decode().encode("utf-16-be"),
        urlset("http://site.test/é", head='<?xml version="1.0" encoding="klingon"?>'),
        urlset("\n\t http://site.test/é \n"),
        urlset("<![CDATA[ http://site.test/é ]]>"),
        urlset("http://site.test/é#part"),
        urlset("http://site.test/é").replace(NS.encode(), b"http://www.google.com/schemas/sitemap/0.84"),
        urlset("http://site.test/é").replace(f' xmlns="{NS}"'.encode(), b""),
        urlset("http://site.test/é").replace(b"<url>", b"<url><x:y>1</x:y>"),
        gzip.compress(urlset("http://site.test/é")),
        gzip.compress(urlset("http://site.test/é")[:50]) + gzip.compress(urlset("http://site.test/é")[50:]),
        gzip.compress(urlset("http://site.test/é")) + b"\0" * 100,
        "http://site.test/é\r\n".encode(),
        b"\xef\xbb\xbf# all of it\n\n  http://site.test/\xe9",
    ],
)
@pytest.mark.parametrize("step", [1, 7, 64 * 1024])
def test_however_it_is_written(data: bytes, step: int) -> None:
    reader, found = read(data, step)
    assert [one.url for one in found] == ["http://site.test/%C3%A9"], reader.trouble


def test_an_ampersand_that_nobody_escaped_is_an_ampersand() -> None:
    locs = [
        "http://site.test/?a=1&b=2&copy=3",
        "http://site.test/?a=1&amp;b=2&lt",
        "http://site.test/&#38;x&#xZ;",
    ]
    for step in (1, 5, 1000):
        found = [one.url for one in read(urlset(*locs), step)[1]]
        assert found == [
            "http://site.test/?a=1&b=2&copy=3",
            "http://site.test/?a=1&b=2&lt",
            "http://site.test/&x&",
        ]


def test_comments_and_cdata_do_not_hide_what_follows() -> None:
    data = urlset("http://site.test/?a&b", "http://site.test/2").replace(
        b"<url>", b"<!-- <![CDATA[ & -- ><url><loc>http://site.test/no</loc></url> --><url>", 1
    )
    assert urls_in(data) == ["http://site.test/?a&b", "http://site.test/2"]


def test_broken_xml_gives_what_was_readable_and_says_so() -> None:
    whole = urlset(*[f"http://site.test/{number}" for number in range(1000)])
    reader, found = read(whole[: len(whole) // 2])
    assert 400 < len(found) < 600
    assert "broken in line 1" in reader.trouble
    reader, found = read(gzip.compress(whole, 1)[:-30])
    assert len(found) > 900
    assert "gzip is truncated" in reader.trouble
    damaged = bytearray(gzip.compress(whole, 1))
    damaged[len(damaged) // 2] ^= 0xFF
    reader, found = read(bytes(damaged))
    assert "gzip" in reader.trouble


def test_behind_a_mistake_urls_are_still_whole() -> None:
    reader, found = read(urlset("http://site.test/\x01", "http://site.test/?a&amp;b&c&#38;d"))
    assert found[-1].url == "http://site.test/?a&b&c&d"
    assert "broken in line 1" in reader.trouble


def test_bad_urls_are_counted_and_never_given() -> None:
    data = urlset(
        "ftp://site.test/", "javascript:1", "http://", "http://u:p@site.test/", "file:///etc/passwd", "x y"
    )
    reader, found = read(data)
    assert found == []
    assert reader.bad == 6


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"<!DOCTYPE html><title>Not found</title>", "page"),
        (b"<!-- hello --> <html><body>", "page"),
        (b'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"/>', "page"),
        (b'<?xml version="1.0"?><note><loc>http://site.test/</loc></note>', "unknown"),
        (b"", "unknown"),
        (b" \n ", "unknown"),
        (b"Nothing here.\nMove on to http://site.test/\n", "unknown"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 100, "unknown"),
        (b'{"error": "no such file"}', "unknown"),
        (b"\x1f\x8b", "unknown"),
    ],
)
def test_what_is_no_sitemap_is_known_as_such(data: bytes, kind: str) -> None:
    reader, found = read(data)
    assert (reader.kind, found) == (kind, [])


# Hostile


LAUGHS = b"""<?xml version="1.0"?><!DOCTYPE lolz [<!ENTITY lol "lol">%s]>
<urlset><url><loc>http://site.test/&lol9;</loc></url></urlset>""" % b"".join(
    b'<!ENTITY lol%d "%s">' % (level, b"&lol%d;" % (level - 1) * 10) for level in range(1, 10)
)


@pytest.mark.parametrize("step", [1, 100, 64 * 1024])
@pytest.mark.parametrize(
    "data",
    [
        LAUGHS,
        LAUGHS.decode().encode("utf-16"),
        b'<!-- <a --><!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><urlset><url><loc>http://x/&e;</loc></url></urlset>',
        b'<!DOCTYPE x [<!ENTITY %% p SYSTEM "http://127.0.0.1:9/x"> %%p;]><urlset/>',
    ],
)
def test_entities_are_refused(data: bytes, step: int) -> None:
    reader, found = read(data, step)
    assert found == []
    assert "entities" in reader.trouble


def test_an_entity_that_is_only_spoken_of_is_text() -> None:
    data = urlset("http://site.test/1").replace(
        b"<url>", b"<url><title><![CDATA[<!DOCTYPE x [<!ENTITY lol>]>]]></title>"
    )
    assert urls_in(data) == ["http://site.test/1"]
    assert urls_in(urlset("http://site.test/&nbsp;&lol;")) == ["http://site.test/&nbsp;&lol;"]


def test_the_limits_of_the_protocol_hold() -> None:
    data = urlset(*[f"http://site.test/{number}" for number in range(200)])
    reader, found = read(data, max_urls=100)
    assert len(found) == 100
    assert "more than 100 URLs" in reader.trouble
    reader, found = read(data, max_bytes=2000)
    assert 30 < len(found) < 60
    assert "larger than 2,000 bytes" in reader.trouble
    lines = b"".join(b"http://site.test/%d\n" % number for number in range(200))
    assert len(read(lines, max_urls=100)[1]) == 100


def bomb(inside: bytes, size: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    block = inside * (1024 * 1024 // len(inside))
    return b"".join([packer.compress(block) for _ in range(size)] + [packer.flush()])


@pytest.mark.parametrize(
    "data",
    [
        bomb(b" ", 1000),
        b"<urlset>" + b" " * 20_000_000,
        b"<?xml" + b" " * 20_000_000,
        b"<urlset>" + b"<a>" * 500_000,
        b"<urlset><url>" + b"<a/>" * 500_000,
        b"<urlset><url><loc>" + b"x" * 20_000_000,
        b"<urlset " + b"a" * 20_000_000,
        b"<!--" + b"x" * 20_000_000,
        b"<![CDATA[" * 500_000,
        b"&" * 1_000_000,
        b"<urlset>" + b"&" * 100_000,
        b"http://site.test/" + b"x" * 20_000_000,
        b"{" * 20_000_000,
        b'{"items":' + b"[" * 5_000_000,
        gzip.compress(b"") * 20_000,
    ],
    ids=["zip bomb", "blanks", "declaration", "deep", "wide", "one text", "one tag", "one comment", "cdata",
         "amps", "amps in it", "one line", "braces", "brackets", "members"],
)  # fmt: skip
def test_memory_stays_bounded(data: bytes) -> None:
    tracemalloc.start()
    try:
        _, found = read(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == []
    assert peak < 50 * 1024 * 1024


@given(st.binary(max_size=3000), st.integers(1, 64))
def test_arbitrary_bytes_never_raise(data: bytes, step: int) -> None:
    for body in (
        data,
        gzip.compress(data),
        b"<urlset><url><loc>" + data,
        b'{"items":[' + data,
        b"http://a/" + data,
    ):
        check(read(body, step))


TEXT = st.text(max_size=40) | st.sampled_from(
    ["http://a.test/", "file:///etc/passwd", "javascript:x", "//b.test/", "\n", "]]>", "<!--", "&x;", "&amp;"]
)
TAGS = st.sampled_from(
    (
        *("urlset", "sitemapindex", "sitemap", "url", "loc", "lastmod", "n:news", "i:image", "i:loc"),
        *("rss", "channel", "item", "link", "guid", "feed", "entry"),
    )
)
PIECE = TEXT | st.builds("<{}>".format, TAGS) | st.builds("</{}>".format, TAGS) | st.just("<link href='x'/>")


@given(
    TAGS,
    st.lists(PIECE, max_size=30).map("".join),
    st.sampled_from(["utf-8", "utf-16", "latin-1"]),
    st.integers(1, 500),
)
def test_whatever_it_holds_only_http_urls_come_out(root: str, inside: str, encoding: str, step: int) -> None:
    document = f"<{root}>{inside}</{root}>"
    check(read(document.encode(encoding, "replace"), step))


@given(st.lists(st.from_regex(r"[a-z0-9/?&=;%#.~-]{0,30}", fullmatch=True), max_size=8), st.integers(1, 99))
def test_every_url_comes_through_in_order(paths: list[str], step: int) -> None:
    """Escaped or not, in CDATA or not, however the pieces fall."""
    wanted = [canonical("http://site.test/" + path) for path in paths]
    for escape in (lambda p: p.replace("&", "&amp;"), lambda p: f"<![CDATA[http://site.test/{p}]]>"):
        locs = [escape(f"http://site.test/{path}" if "CDATA" not in escape("") else path) for path in paths]
        assert [one.url for one in read(urlset(*locs), step)[1]] == wanted


def check(answer: tuple[Reader, list[Entry | Child]]) -> None:
    reader, found = answer
    assert reader.kind in ("sitemap", "index", "feed", "list", "page", "unknown")
    for one in found:
        assert one.url == canonical(one.url)
        assert one.url.startswith(("http://", "https://"))


# Dates


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026", "2026"),
        ("2026-02", "2026-02"),
        ("2026-02-03", "2026-02-03"),
        ("2026-02-03T04:05Z", "2026-02-03T04:05:00Z"),
        ("2026-02-03T04:05:06.789+01:00", "2026-02-03T03:05:06Z"),
        ("2026-02-03 04:05:06", "2026-02-03T04:05:06Z"),
        (" Tue, 03 Feb 2026 04:05:06 +0100 ", "2026-02-03T03:05:06Z"),
        ("3 Feb 2026 04:05 GMT", "2026-02-03T04:05:00Z"),
    ],
)
def test_dates_as_sites_write_them(text: str, shown: str) -> None:
    when = moment(text)
    assert when is not None
    assert when.shown == shown
    assert when.first <= when.last


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2026-13-01", "0000-00-00", "9" * 100, "2026-02-30", "-1", "+"]
)
def test_what_is_no_date(text: str) -> None:
    assert moment(text) is None


@given(st.text(max_size=40))
def test_no_text_raises_as_a_date(text: str) -> None:
    moment(text)


def test_a_day_lasts_until_its_end() -> None:
    day, month, year = moment("2024-02-29"), moment("2024-02"), moment("2024")
    assert day and month and year
    assert day.last - day.first == 24 * 3600 - 1
    assert month.last == day.last
    assert year.last - year.first == 366 * 24 * 3600 - 1


def test_since() -> None:
    assert parse_since("2d", now=1_000_000.0) == 1_000_000.0 - 2 * 86400
    assert parse_since("1W", now=1_000_000.0) == 1_000_000.0 - 7 * 86400
    assert abs(parse_since("10m") - (time.time() - 600)) < 60
    day = moment("2026-01-02")
    assert day is not None
    assert parse_since("2026-01-02") == day.first
    with pytest.raises(UsageError, match="bad date 'soon'"):
        parse_since("soon")
