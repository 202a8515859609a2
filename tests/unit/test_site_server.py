"""The loopback sites that other tests rely on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

from shoal.demo import books as demo
from shoal.demo.books import DemoSite
from shoal.demo.site import (
    Call,
    Hit,
    LoopbackSite,
    Reply,
    StaticSite,
    by_host,
    generated_site,
    max_overlap,
    min_gap,
    serve_in_process,
)


def get(url: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    parts = urlsplit(url)
    assert parts.hostname
    connection = HTTPConnection(parts.hostname, parts.port, timeout=10)
    try:
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        connection.request(method, target, headers={k.replace("_", "-"): v for k, v in headers.items()})
        reply = connection.getresponse()
        return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()
    finally:
        connection.close()


def crawl(start: str) -> dict[str, int]:
    """The simplest crawler there is, to compare a site with what it says of itself."""
    found: dict[str, int] = {}
    waiting = [start]
    while waiting:
        url = waiting.pop()
        if url in found:
            continue
        found[url], headers, body = get(url)
        if location := headers.get("location"):
            waiting.append(urljoin(url, location))
        if found[url] == 200 and headers["content-type"].startswith("text/html"):
            links = re.findall(r"""href=["']([^"']+)""", body.decode())
            waiting += [full for link in links if (full := urljoin(url, link)).startswith("http://127.0.0.")]
    return found


@pytest.mark.parametrize("hosts", [1, 7])
def test_a_crawl_finds_what_is_expected(hosts: int) -> None:
    with LoopbackSite(generated_site(pages=60, links=4, seed=3, hosts=hosts, errors=0.2)) as site:
        found = crawl(site.url)
        assert found == site.expected()
        assert set(found) == site.expected_urls() == {hit.url for hit in site.log()}
        assert 0 < sum(status == 404 for status in found.values()) < 40
        assert len(by_host(site.log())) == hosts == len(site.urls)


def test_without_errors_every_page_is_reachable() -> None:
    for links in (1, 2, 5):
        assert len(generated_site(pages=100, links=links).expected(1)) == 100
    assert generated_site(seed=1).expected(1) == generated_site(seed=1).expected(1)
    assert generated_site(seed=1).body_of(0, 1) != generated_site(seed=2).body_of(0, 1)
    with pytest.raises(ValueError, match="hosts"):
        generated_site(hosts=0)


def test_fifty_hosts_on_one_port() -> None:
    with LoopbackSite(generated_site(pages=50, hosts=50)) as site:
        assert [get(f"{url}status/200")[0] for url in site.urls] == [200] * 50
        assert get(f"http://127.0.0.2:{site.port}/")[0] == 404, "each page lives on one host"


def test_behaviours() -> None:
    with LoopbackSite(generated_site(pages=3), robots="User-agent: *\nDisallow: /x\n") as site:
        base = site.url.rstrip("/")
        assert get(f"{base}/robots.txt")[2] == b"User-agent: *\nDisallow: /x\n"
        assert get(f"{base}/status/418")[0] == 418
        assert get(f"{base}/status/799")[0] == 799
        assert get(f"{base}/redirect/2")[1]["location"] == "/redirect/1"
        assert get(f"{base}/redirect/1")[1]["location"] == "/"
        status, headers, _ = get(f"{base}/redirect/to?url=http://x/&code=308")
        assert (status, headers["location"]) == (308, "http://x/")
        status, headers, _ = get(f"{base}/retry-after/7?code=429")
        assert (status, headers["retry-after"]) == (429, "7")
        assert len(get(f"{base}/size/100000")[2]) == 100_000
        assert json.loads(get(f"{base}/echo", X_Test="1")[2])["x-test"] == "1"
        assert get(f"{base}/nothing")[0] == 404
        before = time.monotonic()
        assert get(f"{base}/slow/0.15")[0] == 200
        assert time.monotonic() - before >= 0.15
        with pytest.raises(ConnectionError):
            get(f"{base}/drop")


@pytest.mark.parametrize("path", ["/etag/a", "/"])
def test_etags(path: str) -> None:
    with LoopbackSite(generated_site()) as site:
        url = site.url.rstrip("/") + path
        status, headers, body = get(url)
        assert status == 200 and body
        status, again, body = get(url, If_None_Match=f'"other", W/{headers["etag"]}')
        assert (status, body, again["etag"]) == (304, b"", headers["etag"])
        assert get(url, If_None_Match='"other"')[0] == 200


def test_head_has_the_headers_and_no_body() -> None:
    with LoopbackSite(generated_site()) as site:
        status, headers, body = get(site.url, "HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["content-length"]) > 100


def test_keep_alive_pipelining_and_bodies() -> None:
    def echo(call: Call) -> Reply:
        return Reply(200, call.method.encode() + b":" + call.body, delay=0.02 if call.path == "/a" else 0)

    with LoopbackSite(echo) as site, socket.create_connection(("127.0.0.1", site.port)) as client:
        client.settimeout(5)
        one = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
        for byte in one:
            client.send(bytes([byte]))
        client.sendall(one + b"GET /b HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        data = b""
        while more := client.recv(65536):
            data += more
        assert data.count(b"HTTP/1.1 200 OK") == 3
        assert data.count(b"POST:abc") == 2 and data.endswith(b"GET:")
        assert {hit.connection for hit in site.log()} == {1}


@pytest.mark.parametrize(
    "noise", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"x" * 70_000]
)
def test_nonsense_is_refused(noise: bytes) -> None:
    with LoopbackSite(generated_site()) as site, socket.create_connection(("127.0.0.1", site.port)) as client:
        client.settimeout(5)
        client.sendall(noise)
        assert client.recv(100).startswith(b"HTTP/1.1 4")


def test_a_broken_responder_is_a_500_that_names_it() -> None:
    def broken(call: Call) -> Reply:
        raise KeyError("oops")

    with LoopbackSite(broken) as site:
        assert get(site.url)[::2] == (500, b"KeyError: 'oops'")


def test_the_log_sees_overlap_pace_and_workers(tmp_path: Path) -> None:
    log_file = tmp_path / "hits.jsonl"
    with LoopbackSite(generated_site(), log_file=log_file) as site:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: get(f"{site.url}slow/0.1", X_Shoal_Worker="w1"), range(4)))
        assert max_overlap(site.log()) == 4
        assert {hit.worker for hit in site.log()} == {"w1"}
        site.clear()
        for _ in range(3):
            get(f"{site.url}slow/0.02")
        assert max_overlap(site.log()) == 1
        assert min_gap(site.log()) >= 0.02
        assert len(log_file.read_bytes().splitlines()) == 7
    assert len(site.log()) == 3, "readable after the end"
    assert json.loads(log_file.read_bytes().splitlines()[0])["path"] == "/slow/0.1"


def hit(start: float, end: float) -> Hit:
    return Hit(start, end, "127.0.0.1", "h", "GET", "/", 200, 1)


def test_the_arithmetic_of_gaps_and_overlaps() -> None:
    assert min_gap([]) == min_gap([hit(1, 2)]) == float("inf")
    assert min_gap([hit(5, 6), hit(1, 2), hit(2.5, 9)]) == 1.5
    assert max_overlap([]) == 0
    assert max_overlap([hit(1, 2), hit(2, 3)]) == 1
    assert max_overlap([hit(1, 4), hit(2, 3), hit(2.5, 5), hit(6, 7)]) == 3


def test_a_client_that_leaves_is_in_the_log() -> None:
    with LoopbackSite(generated_site()) as site:
        with socket.create_connection(("127.0.0.1", site.port)) as client:
            client.sendall(b"GET /slow/30 HTTP/1.1\r\nHost: h\r\n\r\n")
            time.sleep(0.05)
        while not site.log():
            time.sleep(0.01)
        assert site.log()[0].status == 0


def test_stop_leaves_nothing_even_with_open_connections() -> None:
    before = threading.active_count()
    site = LoopbackSite(generated_site()).start()
    with socket.create_connection(("127.0.0.1", site.port)) as client:
        client.sendall(b"GET /slow/30 HTTP/1.1\r\nHost: h\r\n\r\n")
        time.sleep(0.05)
        site.stop()
        site.stop()
    assert threading.active_count() == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", site.port))


def test_a_taken_port_is_an_error_that_leaves_nothing() -> None:
    before = threading.active_count()
    with LoopbackSite(generated_site()) as site, pytest.raises(OSError, match="in use"):
        LoopbackSite(generated_site(), port=site.port).start()
    assert threading.active_count() == before


def test_static_files(tmp_path: Path) -> None:
    root = tmp_path / "www"
    (root / "sub").mkdir(parents=True)
    (root / "index.html").write_text("<title>home</title>")
    (root / "sub" / "a b.txt").write_text("text")
    (tmp_path / "secret").write_text("no")
    with LoopbackSite(StaticSite(str(root))) as site:
        status, headers, body = get(site.url)
        assert (status, body) == (200, b"<title>home</title>")
        assert get(site.url, If_None_Match=headers["etag"])[0] == 304
        assert get(f"{site.url}sub/a%20b.txt")[1]["content-type"].startswith("text/plain")
        assert get(f"{site.url}sub")[1]["location"] == "/sub/"
        assert get(f"{site.url}sub/")[0] == 404
        for evil in ("../secret", "..%2fsecret", "sub/../../secret", "%2e%2e/secret"):
            assert get(f"{site.url}{evil}")[0] == 404
        assert get(f"{site.url}a%00b")[0] in (400, 404, 500)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


def test_a_site_in_its_own_process(tmp_path: Path) -> None:
    with serve_in_process(
        generated_site(pages=20, hosts=3), log_file=tmp_path / "h.jsonl", robots="x"
    ) as site:
        pid = site.pid
        before = time.monotonic()
        assert crawl(site.url) == site.expected()
        hits = site.log()
        assert {hit.url for hit in hits} == site.expected_urls()
        assert all(before <= hit.start <= hit.end <= time.monotonic() for hit in hits), "one clock for all"
        assert len((tmp_path / "h.jsonl").read_bytes().splitlines()) == 20
        assert get(f"{site.url}robots.txt")[2] == b"x"
    assert gone(pid)
    assert len(site.log()) == 21


def test_a_killed_site_can_be_stopped() -> None:
    site = serve_in_process(generated_site())
    os.kill(site.pid, signal.SIGKILL)
    site.stop()


def test_the_process_dies_with_its_parent() -> None:
    code = (
        "import sys,time\nfrom shoal.demo.site import generated_site, serve_in_process\n"
        "s=serve_in_process(generated_site())\n"
        "sys.stdout.write(f'{s.pid}\\n'); sys.stdout.flush()\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    assert gone(child)


def test_the_log_tells_when_a_request_came_not_when_the_server_looked() -> None:
    at_work, go_on = threading.Event(), threading.Event()

    def busy(call: Call) -> Reply:
        if call.path == "/long":
            at_work.set()
            go_on.wait(10)
        return Reply()

    with LoopbackSite(busy) as site, ThreadPoolExecutor(1) as other:
        long = other.submit(get, f"{site.url}long")
        assert at_work.wait(10)
        connection = HTTPConnection("127.0.0.1", site.port)
        connection.request("GET", "/short")
        sent = time.monotonic()
        time.sleep(0.05)
        go_on.set()
        assert connection.getresponse().status == long.result()[0] == 200
        connection.close()
        [short] = [hit for hit in site.log() if hit.path == "/short"]
    assert sent - 1 < short.start <= sent


def test_the_command_line_writes_its_port(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "shoal.demo.site", "--pages", "3", "--port-file", str(port_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout
        port = int(server.stdout.readline())
        assert int(port_file.read_text()) == port
        assert get(f"http://127.0.0.1:{port}/page/2")[0] == 200
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 0


def test_the_demo_shop() -> None:
    with DemoSite() as site:
        found = crawl(site.url)
        base = site.url.rstrip("/")
        pages = {f"{base}{path}" for path in demo.pages()}
        assert 24 <= len(pages) <= 30
        assert {url for url, status in found.items() if status == 200} - {f"{base}/style.css"} == pages
        dead = {urlsplit(url).path for url, status in found.items() if status == 404}
        assert dead == {"/events/", "/basket"}, "one dead link; the basket is what robots.txt forbids"
        assert [url for url, status in found.items() if status == 301] == [f"{base}/shop"]
        locations = set(re.findall(r"<loc>(.*?)</loc>", get(f"{base}/sitemap.xml")[2].decode()))
        assert locations == pages
        assert f"Sitemap: {base}/sitemap.xml" in get(f"{base}/robots.txt")[2].decode()
        headers = get(f"{base}/about")[1]
        assert get(f"{base}/about", If_None_Match=headers["etag"])[0] == 304
        for url in pages:
            for block in re.findall(r"ld\+json'>(.*?)</script>", get(url)[2].decode()):
                assert json.loads(block)["@type"] in ("Book", "BookStore")
