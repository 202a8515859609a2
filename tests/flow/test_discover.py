"""`shoal discover` against whole sites: what they name is found, and at their pace."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from shoal import Shoal
from shoal.app import Session, discovery
from shoal.cli.discover import _hint
from shoal.demo.site import Call, LoopbackSite, Reply, by_host, max_overlap, min_gap
from shoal.fetch.guard import no_public_address
from shoal.politeness.permission import Permission
from shoal.settings import load
from tests.rig.command import Ended, Shell, wait_until

XML = "application/xml"
FLAGS = ("--allow-private", "--rate", "none")

Body = bytes | str | Reply | Callable[[Call], Reply]


@contextmanager
def serving(hosts: int = 1, /, **paths: Body) -> Iterator[LoopbackSite]:
    """A site with these files. `$` in them is the address of the first host, `$2` of the second."""

    def respond(call: Call) -> Reply:
        name = call.bare.strip("/").replace(".", "_").replace("-", "_").replace("/", "__") or "home"
        body = paths.get(name, Reply(200 if name.isdecimal() else 404, b"<!doctype html><p>hello"))
        if callable(body):
            return body(call)
        if isinstance(body, str):
            for number in range(hosts, 1, -1):
                body = body.replace(f"${number}", f"http://127.0.0.{number}:{call.port}")
            body = body.replace("$", f"http://127.0.0.1:{call.port}").encode()
        return body if isinstance(body, Reply) else Reply(200, body, XML)

    with LoopbackSite(respond, hosts=hosts) as site:
        yield site


def urlset(*locs: str, lastmod: str = "") -> str:
    date = f"<lastmod>{lastmod}</lastmod>" if lastmod else ""
    return "<urlset>" + "".join(f"<url><loc>{full(loc)}</loc>{date}</url>" for loc in locs) + "</urlset>"


def full(loc: str) -> str:
    """Sitemaps name whole URLs."""
    return f"${loc}" if loc.startswith("/") else loc


def index(*locs: str, lastmod: str = "") -> str:
    date = f"<lastmod>{lastmod}</lastmod>" if lastmod else ""
    return (
        "<sitemapindex>"
        + "".join(f"<sitemap><loc>{full(loc)}</loc>{date}</sitemap>" for loc in locs)
        + "</sitemapindex>"
    )


def found(ended: Ended, site: LoopbackSite) -> list[str]:
    """What was printed, without the site's own address."""
    return [line.removeprefix(site.url.rstrip("/")) for line in ended.out.splitlines()]


def rows(ended: Ended) -> list[dict[str, Any]]:
    """The objects on stdout, one a line."""
    return [json.loads(line) for line in ended.out.splitlines()]


def paths(site: LoopbackSite) -> list[str]:
    return [hit.path for hit in site.log()]


def test_robots_index_gzip_and_feeds(shell: Shell) -> None:
    with serving(
        robots_txt="User-agent: *\nSitemap: $/main-index.xml\nSitemap: $/list.txt\n",
        main_index_xml=index("$/pages.xml.gz", "/nested.xml", "$/main-index.xml", "$/gone.xml"),
        nested_xml=index("/news.xml", "$/pages.xml.gz"),
        pages_xml_gz=lambda call: Reply(
            200,
            gzip.compress(urlset("/a", "/b?x=1&y=2").replace("$", f"http://127.0.0.1:{call.port}").encode()),
            "text/plain",
        ),
        news_xml=urlset("/news/1", "/a", "http://other.test/no", lastmod="2026-01-02"),
        list_txt="$/from-list\n",
        home=Reply(200, b"<link rel=alternate type=application/rss+xml href=/feed>"),
        feed="<rss><channel><item><link>$/from-feed</link></item></channel></rss>",
    ) as site:
        ended = shell.run("discover", site.url, *FLAGS)
        log = paths(site)
    assert sorted(found(ended, site)) == ["/a", "/b?x=1&y=2", "/from-feed", "/from-list", "/news/1"]
    assert ended.code == 1, "a file that the index names is gone"
    assert "gone.xml: http_404" in ended.err
    assert "5 URLs from 6 files; 1 could not be read" in ended.err
    assert "left out: 1 on other hosts" in ended.err
    assert len(log) == len(set(log)), "an index that names itself is read once"
    assert not shell.db.exists(), "asking leaves nothing behind"


def test_json_and_since(shell: Shell) -> None:
    with serving(
        sitemap_xml=index("/old.xml", lastmod="2020-01-01").replace("</sitemapindex>", "")
        + "<sitemap><loc>$/new.xml</loc></sitemap></sitemapindex>",
        old_xml=urlset("/never-read"),
        new_xml="<urlset><url><loc>$/1</loc><lastmod>2026-05-01</lastmod></url>"
        "<url><loc>$/2</loc><lastmod>2026-04-30T23:59:59Z</lastmod></url><url><loc>$/3</loc></url></urlset>",
    ) as site:
        ended = shell.run("discover", site.url, *FLAGS, "--json", "--since", "2026-05-01")
        both = shell.run("discover", site.url, *FLAGS, "--since", "2026-05-01", "--undated")
        assert "/old.xml" not in paths(site)
    source = f"{site.url}new.xml"
    assert [json.loads(line) for line in ended.out.splitlines()] == [
        {"url": f"{site.url}1", "lastmod": "2026-05-01", "source": source}
    ]
    assert ended.code == 0
    assert "1 older than --since" in ended.err
    assert "1 without a date" in ended.err
    assert found(both, site) == ["/1", "/3"]


def test_guesses_stop_at_the_first_that_exists(shell: Shell) -> None:
    soft = Reply(200, b"<!doctype html><h1>Sorry</h1>")
    with serving(sitemap_xml=soft, sitemap_index_xml=urlset("/1"), feed=urlset("/no")) as site:
        assert found(shell.run("discover", site.url, *FLAGS), site) == ["/1"]
        assert paths(site) == ["/robots.txt", "/sitemap.xml", "/sitemap_index.xml", "/"]
    with serving(atom_xml="<feed><entry><link href='/2'/></entry></feed>") as site:
        assert found(shell.run("discover", site.url, *FLAGS), site) == ["/2"]


def test_a_guess_that_fails_is_worth_a_word(shell: Shell) -> None:
    with serving(sitemap_xml=Reply(500, b""), sitemap_index_xml=urlset("/1"), home=b"hello") as site:
        ended = shell.run("discover", site.url, *FLAGS)
        quiet = shell.run("discover", site.url, *FLAGS, "--quiet")
    assert (ended.code, found(ended, site)) == (0, ["/1"]), ended
    assert f"warning: {site.url}sitemap.xml: http_500: " in ended.err and "http_404" not in ended.err
    assert (quiet.code, found(quiet, site), quiet.err) == (0, ["/1"], "")


def test_a_missing_home_page_is_no_error_when_there_are_sitemaps(shell: Shell) -> None:
    with serving(sitemap_xml=urlset("/1")) as site:
        ended = shell.run("discover", site.url, *FLAGS)
    assert (ended.code, "404" in ended.err, "error:" in ended.err) == (0, False, False), ended
    with serving() as site:
        ended = shell.run("discover", site.url, *FLAGS)
        quiet = shell.run("discover", site.url, *FLAGS, "--quiet")
    assert (ended.code, f"warning: {site.url}: http_404" in ended.err, "error:" in ended.err) == (
        3,
        True,
        False,
    )
    assert (quiet.code, quiet.out, quiet.err) == (3, "", "")


def test_a_host_without_tls_gets_a_hint(shell: Shell) -> None:
    with serving(sitemap_xml=urlset("/1")) as site:
        where = site.url.split("/")[2]
        ended = shell.run("discover", where, *FLAGS)
    assert (ended.code, f"`shoal discover http://{where}`" in ended.err) == (3, True), ended


def test_one_file_by_its_address(shell: Shell) -> None:
    with serving(a__b_xml=urlset("/a/c", "/d"), robots_txt="Sitemap: $/x.xml", x_xml=urlset("/no")) as site:
        ended = shell.run("discover", f"{site.url}a/b.xml", *FLAGS)
        assert found(ended, site) == ["/a/c", "/d"]
        assert paths(site) == ["/robots.txt", "/a/b.xml"]


def test_patterns_scope_and_limit(shell: Shell) -> None:
    with serving(
        2, sitemap_xml=urlset("/", "/blog/1", "/blog/2", "/shop/1", "$2/blog/3", "$2/blog/4"), home=b"hello"
    ) as site:

        def run(*more: str) -> list[str]:
            return found(shell.run("discover", site.url, *FLAGS, *more), site)

        assert run("--include", "/blog/*", "--exclude", "*2") == ["/blog/1"]
        assert len(run("--scope", "any")) == 6
        assert run("--limit", "2") == ["/", "/blog/1"]


def test_other_hosts_count_only_if_robots_names_them(shell: Shell) -> None:
    files: dict[str, Body] = {
        "sitemap_xml": index("$2/theirs.xml"),
        "theirs_xml": urlset("$/ours", "$2/theirs"),
    }
    with serving(2, **files) as site:
        ended = shell.run("discover", site.url, *FLAGS)
        assert ended.out == ""
        assert "files on other hosts" in ended.err
        assert {hit.address for hit in site.log()} == {"127.0.0.1"}
    with serving(2, robots_txt="Sitemap: $/sitemap.xml", **files) as site:
        assert found(shell.run("discover", site.url, *FLAGS), site) == ["/ours"]


def test_what_robots_forbids_is_not_fetched(shell: Shell) -> None:
    files: dict[str, Body] = {
        "robots_txt": "User-agent: *\nDisallow: /private\nDisallow: /sitemap\nSitemap: $/sitemap-all.xml",
        "sitemap_all_xml": index("/private/1.xml", "/open.xml"),
        "private__1_xml": urlset("/secret"),
        "open_xml": urlset("/open"),
    }
    with serving(**files) as site:
        ended = shell.run("discover", site.url, *FLAGS)
        assert found(ended, site) == ["/open"], "what robots.txt names may be read, what it forbids may not"
        assert "/private/1.xml: robots: disallowed" in ended.err
        assert "/private/1.xml" not in paths(site)
        assert found(shell.run("discover", site.url, *FLAGS, "--no-robots"), site) == ["/secret", "/open"]


def test_files_come_one_at_a_time_at_the_pace_of_the_site(shell: Shell) -> None:
    with serving(
        robots_txt="User-agent: *\nCrawl-delay: 0.4\nSitemap: $/i.xml",
        i_xml=index("/1.xml", "/2.xml", "/3.xml"),
        **{f"{number}_xml": urlset(f"/{number}") for number in (1, 2, 3)},
    ) as site:
        ended = shell.run("discover", site.url, "--allow-private", "--rate", "20/s")
        hits = by_host(site.log())["127.0.0.1"]
    assert sorted(found(ended, site)) == ["/1", "/2", "/3"]
    assert len(hits) == 6
    assert min_gap(hits) >= 0.2
    assert max_overlap(hits) == 1


def test_a_host_in_trouble_is_asked_again(shell: Shell) -> None:
    troubles = [Reply(503, headers=(("Retry-After", "1"),))]

    def sitemap(call: Call) -> Reply:
        text = urlset("/1").replace("$", f"http://127.0.0.1:{call.port}")
        return troubles.pop() if troubles else Reply(200, text.encode(), XML)

    with serving(robots_txt="Sitemap: $/s.xml", s_xml=sitemap) as site:
        ended = shell.run("discover", site.url, *FLAGS)
        assert (ended.code, found(ended, site)) == (0, ["/1"]), ended.err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("discover", "http://127.0.0.1:8000/"), 3, "not public"),
        (("discover", "http://127.0.0.1:1/"), 3, "port 1 belongs to another protocol"),
        (("discover", "http://127.0.0.1:1/", "--allow-private"), 3, "connect_refused"),
        (("discover", "ftp://a.test/"), 2, "not http or https"),
        (("discover", "http://a.test/", "--since", "soon"), 2, "bad date 'soon'"),
        (("discover", "http://a.test/", "--include", "re:["), 2, "bad pattern"),
        (("discover", "http://a.test/", "--limit", "0"), 2, "--limit 0"),
        (("discover", "http://a.test/", "--enqueue", "j", "--frontier", "redis://127.0.0.1:1"), 4, "redis"),
    ],
)
def test_what_goes_wrong_is_said(shell: Shell, arguments: tuple[str, ...], code: int, says: str) -> None:
    ended = shell.run(*arguments)
    assert (ended.code, ended.out) == (code, ""), ended
    assert says in ended.err.lower()
    assert "Traceback" not in ended.err


def test_nothing_there(shell: Shell) -> None:
    with serving(home=b"<!doctype html>hi") as site:
        ended = shell.run("discover", site.url, *FLAGS)
    assert (ended.code, ended.out) == (3, "")
    assert "shoal crawl" in ended.err


def test_hostile_files_do_no_harm(shell: Shell) -> None:
    laughs = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>' + urlset("/&b;")
    with serving(
        robots_txt="\n".join(
            f"Sitemap: $/{name}.xml" for name in ("laughs", "bomb", "big", "loop", "half", "html", "ok")
        ),
        laughs_xml=laughs,
        bomb_xml=gzip.compress(b"<urlset>" + b" " * (80 << 20)),
        big_xml=Reply(
            200, gzip.compress(b"<urlset>" + b" " * (80 << 20)), XML, (("Content-Encoding", "gzip"),)
        ),
        loop_xml=Reply(302, headers=(("Location", "/loop.xml"),)),
        half_xml=urlset("/half")[:-20] + "</loc></url><url><loc>/cut",
        html_xml=b"<!doctype html><h1>Log in",
        ok_xml=urlset("/ok"),
    ) as site:
        ended = shell.run("discover", site.url, *FLAGS)
    assert ended.code == 1
    assert "/ok" in found(ended, site)
    for name, says in {
        "laughs": "entities",
        "bomb": "larger than 52,428,800 bytes",
        "big": "body_too_large",
        "loop": "too_many_redirects",
        "half": "broken in line 1",
        "html": "a web page",
    }.items():
        assert any(f"/{name}.xml: " in line and says in line for line in ended.err.splitlines()), (
            name,
            ended.err,
        )


def test_enqueue_again_and_again_as_cron_does(shell: Shell) -> None:
    told = ["/1", "/2"]

    def news(call: Call) -> Reply:
        text = urlset(*told, lastmod="2026-05-01").replace("$", f"http://127.0.0.1:{call.port}")
        return Reply(200, text.encode(), XML)

    with serving(sitemap_xml=news) as site:
        again = ("discover", site.url, *FLAGS, "--enqueue", "news", "--json")
        assert shell.run(*again).json() == {
            "job": "news", "new": 2, "known": 0, "refused": 0, "files": 1, "failed": 0,
        }  # fmt: skip
        assert shell.run(*again).json()["known"] == 2
        assert shell.run("worker", "--drain").code == 0
        told.append("/3")
        answer = shell.run(*again).json()
        assert (answer["new"], answer["known"]) == (1, 2)
        (finding,) = shell.ask(lambda frontier: frontier.find(f"{site.url}3", "news"))
        assert finding.request is not None
        assert finding.request.data == {"lastmod": "2026-05-01", "source": f"{site.url}sitemap.xml"}
        # The same by a pipe.
        printed = shell.run("discover", site.url, *FLAGS).out
        (shell.root / "urls.txt").write_text(printed)
        for _ in range(2):
            ended = shell.run("enqueue", "news", "--urls-file", "urls.txt", "--json")
            assert ended.json() == {"job": "news", "new": 0, "known": 3, "refused": 0, "bad": 0}
        assert shell.run("worker", "--drain").code == 0
        assert shell.job("news").counts.done == 3
        assert [path for path in paths(site) if path in ("/1", "/2", "/3")] == ["/1", "/2", "/3"]
    assert shell.check() == []


@pytest.fixture(params=["sqlite", "redis"])
def frontier(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment that names a frontier."""
    return {} if request.param == "sqlite" else {"SHOAL_FRONTIER": request.getfixturevalue("redis_url")}


def test_workers_and_discover_share_the_pace_of_a_host(shell: Shell, frontier: dict[str, str]) -> None:
    pages = [f"/p/{number}" for number in range(20)]
    with serving(
        sitemap_xml=index(*[f"/s{number}.xml" for number in range(3)]),
        **{f"s{number}_xml": urlset(*pages) for number in range(3)},
    ) as site:
        (shell.root / "urls.txt").write_text("".join(f"{site.url}{page[1:]}\n" for page in pages))
        rate = ("--allow-private", "--rate", "5/s")
        assert shell.run("enqueue", "pages", "--urls-file", "urls.txt", *rate, env=frontier).code == 0
        worker = shell.start("worker", "--drain", env=frontier)
        wait_until(lambda: len(site.log()) > 2, "the worker to begin")
        ended = shell.run("discover", site.url, *rate, "--enqueue", "pages", "--json", env=frontier)
        assert ended.json()["known"] == 20, (ended, [hit.path for hit in site.log()])
        worker.wait()
        hits = by_host(site.log())["127.0.0.1"]
    assert len(hits) >= 20 + 5
    assert max_overlap(hits) == 1
    # A busy machine delays a request now and then; five calls between visits would halve five gaps.
    gaps = sorted(after.start - before.start for before, after in pairwise(hits))
    assert gaps[3] > 0.1, gaps


def test_standard_output_that_nobody_reads(shell: Shell) -> None:
    with serving(sitemap_xml=urlset(*[f"/{number}" for number in range(50_000)])) as site:
        read_end, write_end = os.pipe()
        running = shell.start("discover", site.url, *FLAGS, out=write_end)
        os.close(write_end)
        os.read(read_end, 100)
        os.close(read_end)
        ended = running.wait()
    assert "Traceback" not in ended.err


async def test_from_python() -> None:
    with serving(sitemap_xml=urlset("/1", "/2", lastmod="2026-01-01")) as site:
        app = Shoal(allow_private=True, rate="none")
        entries = [entry async for entry in app.discover(site.url)]
        assert [entry.url for entry in entries] == [f"{site.url}1", f"{site.url}2"]
        assert [entry async for entry in app.discover(site.url, since="2026-02-01")] == []


@pytest.mark.parametrize("path", ["", "sitemap.xml"])
@pytest.mark.parametrize("robots", [(), ("--no-robots",)])
def test_a_site_that_cannot_be_reached_is_not_recommended_for_a_crawl(
    shell: Shell, robots: tuple[str, ...], path: str
) -> None:
    env = {"SHOAL_RETRIES": "0"}
    ended = shell.run("discover", f"http://127.0.0.1:9/{path}", *FLAGS, *robots, env=env)
    assert ended.code == 3
    assert "hint: the site cannot be reached" in ended.err and "shoal crawl" not in ended.err


@pytest.mark.parametrize("path", ["", "sitemap.xml"])
def test_the_hint_fits_what_stands_in_the_way(shell: Shell, path: str) -> None:
    env = {"SHOAL_RETRIES": "0"}
    with serving(robots_txt=Reply(503, b"")) as site:
        ended = shell.run("discover", f"{site.url}{path}", *FLAGS, env=env)
        assert ended.code == 3 and "hint: robots.txt could not be read: try again later" in ended.err
        blocked = shell.run("discover", f"{site.url}{path}", "--rate", "none")
        assert blocked.code == 3 and "shoal crawl" not in blocked.err
        assert "hint: private addresses need --allow-private" in blocked.err
    with serving() as site:
        ended = shell.run("discover", f"{site.url}{path}", *FLAGS)
        assert (
            ended.code == 3
            and f"find pages by their links instead: `shoal crawl {site.url}{path}`" in ended.err
        )


async def test_a_name_that_leads_nowhere_may_be_one_of_our_own_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nowhere(_self: Permission, url: str, **_more: object) -> None:
        raise no_public_address(url, "dns_not_found")

    monkeypatch.setattr(Permission, "ask", nowhere)  # a name server would be asked that is not ours
    async with Session.opened(load(frontier="memory:", rate="none")) as session:
        found = discovery(session, "http://intranet.test/")
        assert [entry async for entry in found] == []
    assert "--allow-private" in _hint(found, "intranet.test")


def test_a_host_that_is_paused_or_rests_for_long_is_not_waited_for(shell: Shell) -> None:
    tired = Reply(503, headers=(("Retry-After", "1000"),))
    with serving(robots_txt="Sitemap: $/s.xml", s_xml=tired) as site:
        ended = shell.run("discover", site.url, *FLAGS, "--enqueue", "news")
        assert (ended.code, "asks to wait for more than 120 s" in ended.err) == (3, True), ended
        host = site.url.split("/")[2]
        assert shell.run("lanes", "pause", host).code == 0
        ended = shell.run("discover", site.url, *FLAGS, "--enqueue", "news")
        assert (ended.code, f"{host} is paused" in ended.err) == (2, True), ended
        files = [job for job in shell.run("jobs", "--json").json() if job["job"] != "news"]
        assert {job["state"] for job in files} == {"cancelled"}, "nobody reads on later"


def test_the_files_are_a_job_that_any_worker_reads(shell: Shell) -> None:
    """What `shoal discover` visits are pages of a job: paced, seen and told like any other."""
    with serving(sitemap_xml=urlset("/1", "/2")) as site:
        assert shell.run("discover", site.url, *FLAGS, "--enqueue", "news").code == 0
        (files,) = [job for job in shell.run("jobs", "--json").json() if job["job"] != "news"]
        assert files["state"] == "done"
        items = rows(shell.run("results", files["job"]))
    assert [item["url"] for item in items if "url" in item] == [f"{site.url}1", f"{site.url}2"]
    (told,) = [item for item in items if item.get("kind") == "sitemap"]
    assert (told["file"], told["told"]) == (f"{site.url}sitemap.xml", 2)
    assert shell.check() == []
