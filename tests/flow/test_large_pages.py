"""Heavy pages are read apart: their items are whole, and one that was made to do harm costs nobody else."""

from __future__ import annotations

from shoal.demo.site import Call, LoopbackSite, Reply
from shoal.scrape.page import HEAVY_TAGS, LIGHT
from tests.rig.command import Shell

ROWS = "".join(f"<tr><td>{n}</td><td>row {n}</td></tr>" for n in range(40_000))
BOOK = f"<title>Book</title><h1>Rows</h1><table>{ROWS}</table><a href=/after>after</a>".encode()
OPEN = "<p>" + "".join(f"<font a{n}>" for n in range(400))
BOMB = f"<title>Bomb</title>{OPEN}{'<p>x' * 300_000}".encode()


def respond(call: Call) -> Reply:
    pages = {
        "/": b"<title>Home</title><a href=/book>book</a> <a href=/bomb>bomb</a>",
        "/book": BOOK,
        "/bomb": BOMB,
        "/after": b"<title>After</title>",
    }
    return Reply(body=pages[call.path]) if call.path in pages else Reply(404)


def test_a_large_page_is_read_and_a_bomb_is_not(shell: Shell) -> None:
    assert len(BOOK) > LIGHT and BOOK.count(b"<") > HEAVY_TAGS
    assert len(BOMB) > LIGHT and BOMB.count(b"<") > HEAVY_TAGS
    with LoopbackSite(respond) as site:
        ended = shell.run("crawl", site.url, "--allow-private", "--rate", "none", "--json")
    assert ended.code == 1, ended.err
    (job,) = shell.jobs()
    assert job.errors == {"page_too_complex": 1}
    items = {item["title"]: item for item in shell.items(job.id)}
    assert sorted(items) == ["After", "Book", "Home"]
    assert "row 39999" in items["Book"]["text"]
    assert items["Book"]["links"] == [f"{site.url}after"]
    assert items["After"]["depth"] == 2
