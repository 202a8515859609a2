"""The upper bound: no framework, no guard, no durability, just a loop over libcurl, a parser and a set."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import pycurl
from ada_url import join_url
from meter import Meter, arguments
from msgspec.json import Encoder
from turbohtml import parse

CONNECTIONS = 64


def crawl(start: str, out: str) -> None:
    """Every page of one host, one JSON line each."""
    multi = pycurl.CurlMulti()
    idle = [_handle() for _ in range(CONNECTIONS)]
    queue, seen, busy = deque([start]), {start}, 0
    origin = start[: start.index("/", 8) + 1]
    encode = Encoder().encode
    with open(out, "wb") as lines:
        while queue or busy:
            while queue and idle:
                curl = idle.pop()
                curl.url = queue.popleft()
                curl.body = []
                curl.setopt(pycurl.URL, curl.url)
                curl.setopt(pycurl.WRITEFUNCTION, curl.body.append)
                multi.add_handle(curl)
                busy += 1
            while multi.perform()[0] == pycurl.E_CALL_MULTI_PERFORM:
                pass
            waiting, done, failed = multi.info_read()
            for curl, code, reason in failed:
                raise SystemExit(f"{curl.url}: {code} {reason}")
            for curl in done:
                multi.remove_handle(curl)
                busy -= 1
                idle.append(curl)
                kind = curl.getinfo(pycurl.CONTENT_TYPE) or ""
                if curl.getinfo(pycurl.RESPONSE_CODE) == 200 and kind.startswith("text/html"):
                    lines.write(encode(_page(curl, origin, seen, queue.append)) + b"\n")
            if not done and not waiting and busy:
                multi.select(1.0)


def _handle() -> pycurl.Curl:
    curl = pycurl.Curl()
    curl.setopt(pycurl.NOSIGNAL, 1)
    curl.setopt(pycurl.PROXY, "")
    return curl


def _page(curl: pycurl.Curl, origin: str, seen: set[str], add: Callable[[str], None]) -> dict[str, object]:
    base = curl.url
    document = parse(b"".join(curl.body), positions=False)
    links: dict[str, None] = {}
    for href in {href.partition("#")[0] for href in document.xpath("//a/@href")}:
        with suppress(ValueError):
            links[join_url(base, href)] = None
    for link in links:
        if link not in seen and link.startswith(origin):
            seen.add(link)
            add(link)
    title = document.find("title")
    return {"url": base, "title": title.text if title else None, "links": list(links)}


if __name__ == "__main__":
    url, out = arguments()
    meter = Meter("bare-loop")
    crawl(url, out)
    meter.report(out)
