"""Feeds: RSS 2.0, RSS 1.0, Atom, JSON Feed."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from shoal.app import feeds_of
from shoal.discover.entry import Entry
from shoal.discover.reader import Reader
from shoal.model import Response

HERE = "https://site.test/blog/feed"


def entries(text: str | bytes) -> list[Entry]:
    reader = Reader(HERE)
    found = reader.feed(text if isinstance(text, bytes) else text.encode()) + reader.close()
    assert reader.kind == "feed", reader.trouble
    return [one for one in found if isinstance(one, Entry)]


def told(text: str) -> list[tuple[str, str | None]]:
    return [(entry.url, entry.lastmod) for entry in entries(text)]


def test_rss_2() -> None:
    assert told("""<?xml version="1.0"?><rss version="2.0" xmlns:atom="http://www.w3.org/2005/Atom"
        xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:feedburner="http://rssnamespace.org/feedburner/ext/1.0">
      <channel><link>https://site.test/</link><atom:link rel="self" href="https://site.test/blog/feed"/>
        <image><link>https://site.test/logo</link></image>
        <item><title>A &amp; B</title><link>https://site.test/1?a=1&b=2</link>
              <pubDate>Sat, 07 Sep 2026 08:00:00 +0200</pubDate></item>
        <item><guid>https://site.test/2</guid><dc:date>2026-09-08</dc:date></item>
        <item><guid isPermaLink="false">https://site.test/id-3</guid><link>/3</link></item>
        <item><guid isPermaLink="false">https://site.test/id-4</guid></item>
        <item><link>https://proxy.test/5</link><feedburner:origLink>https://site.test/5</feedburner:origLink></item>
        <item><atom:link rel="self" href="https://site.test/no"/><link><![CDATA[https://site.test/6]]></link></item>
      </channel></rss>""") == [
        ("https://site.test/1?a=1&b=2", "2026-09-07T06:00:00Z"),
        ("https://site.test/2", "2026-09-08"),
        ("https://site.test/3", None),
        ("https://site.test/5", None),
        ("https://site.test/6", None),
    ]


def test_an_old_rss_with_its_doctype() -> None:
    assert told("""<!DOCTYPE rss PUBLIC "-//Netscape Communications//DTD RSS 0.91//EN"
        "http://my.netscape.com/publish/formats/rss-0.91.dtd">
        <rss version="0.91"><channel><item><link>https://site.test/1</link></item></channel></rss>""") == [
        ("https://site.test/1", None)
    ]


def test_rss_1() -> None:
    assert told("""<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns="http://purl.org/rss/1.0/"
        xmlns:dc="http://purl.org/dc/elements/1.1/"><channel rdf:about="x"><link>https://site.test/</link></channel>
        <item rdf:about="https://site.test/1"><link>https://site.test/1</link><dc:date>2026-01-01T00:00:00Z</dc:date>
        </item></rdf:RDF>""") == [("https://site.test/1", "2026-01-01T00:00:00Z")]


def test_atom_with_bases_and_a_source_inside() -> None:
    text = """<feed xmlns="http://www.w3.org/2005/Atom" xml:base="/posts/">
      <link href="/"/><updated>2026-01-09</updated>
      <entry><link rel="self" href="no"/>
        <link rel="enclosure" href="no.mp3"/><link rel="alternate" href="one"/>
        <published>2026-01-01T00:00:00Z</published><updated>2026-01-02T00:00:00Z</updated>
        <source><link href="https://site.test/elsewhere"/><updated>2020-01-01</updated></source></entry>
      <entry xml:base="https://site.test/other/"><link href="two"/></entry>
      <entry><id>tag:site.test,2026:3</id></entry></feed>"""
    assert told(text) == [
        ("https://site.test/posts/one", "2026-01-02T00:00:00Z"),
        ("https://site.test/other/two", None),
    ]
    assert entries(text)[0].document()["published"] == "2026-01-01T00:00:00Z"


def test_json_feed() -> None:
    text = json.dumps(
        {
            "version": "https://jsonfeed.org/version/1.1",
            "items": [
                {
                    "id": "1",
                    "url": "/1",
                    "date_published": "2026-01-01",
                    "date_modified": "2026-01-05T00:00:00Z",
                },
                {"id": "2", "external_url": "https://site.test/2"},
                {"id": "https://site.test/3"},
                {"id": "4"},
                {"id": 5, "url": ["x"]},
                {"url": "javascript:alert(1)"},
                None,
            ],
        }
    )
    assert told(text) == [
        ("https://site.test/1", "2026-01-05T00:00:00Z"),
        ("https://site.test/2", None),
        ("https://site.test/3", None),
    ]
    reader = Reader(HERE)
    reader.feed(b"\xef\xbb\xbf" + text.encode())
    reader.close()
    assert (reader.kind, reader.bad) == ("feed", 4)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.just("http://a.test/"),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["items", "url", "id", "date_modified", "x"]), inner)
    ),
    max_leaves=10,
)


@given(JSON)
def test_no_json_raises(document: object) -> None:
    for text in (json.dumps(document), json.dumps({"items": document}), json.dumps({"items": [document]})):
        reader = Reader(HERE)
        for one in reader.feed(text.encode()) + reader.close():
            assert one.url.startswith(("http://", "https://"))


def test_a_page_declares_its_feeds() -> None:
    body = b"""<!doctype html><base href="/b/"><link rel="alternate" hreflang="de" href="/de">
      <link rel="alternate" type="application/rss+xml" href="rss">
      <link rel="ALTERNATE home" type="Application/Atom+XML; charset=utf-8" href="https://other.test/atom">
      <link rel="alternate" type="application/rss+xml" href="rss#again">
      <link rel="alternate" type="application/feed+json" href="javascript:1">
      <link rel="stylesheet" type="application/rss+xml" href="no">"""
    page = Response("https://site.test/x", 200, (("content-type", "text/html"),), body, 0.0)
    assert feeds_of(page) == ["https://site.test/b/rss", "https://other.test/atom"]
    assert feeds_of(Response("https://site.test/x", 200, (("content-type", "image/png"),), body, 0.0)) == []
