"""What a hostile page may cost: a table of documents, each read in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading

import pytest

from shoal.errors import CLASSES, FetchError
from shoal.scrape.ceiling import LEAST, MOST, under_ceiling

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the ceiling needs /proc")

MEMORY = 700
"""Megabytes: the interpreter, a body of 10 MB as bytes and text, a tree and one answer about it."""
SECONDS = 12
"""Of CPU, for everything that is asked of one page together; a slow machine takes 4."""

READ = """
import json, sys, time
from shoal.errors import FetchError
from shoal.model import Request, Response
from shoal.scrape.page import Page

def fonts(n):
    return "<p>" + "".join(f"<font a{i}>" for i in range(n))

MB = 1_000_000
body = eval(sys.argv[1]).encode()
assert len(body) <= 10_485_760, len(body)
html = (("content-type", "text/html"),)
page = Page(
    Request("http://h.test/", "j"),
    Response(url="http://h.test/", status=200, headers=html, body=body, seconds=0.0),
)
asked = {
    "links": page.links,
    "title": lambda: page.title,
    "description": lambda: page.description,
    "text": page.text,
    "css": lambda: page.css("div a"),
    "markdown": page.markdown,
}
answers, longest = {}, 0.0
for name, ask in asked.items():
    begun = time.process_time()
    try:
        ask()
        answers[name] = "ok"
    except FetchError as error:
        answers[name] = error.error
    longest = max(longest, time.process_time() - begun)
spent = time.process_time()
del page, body, ask, asked
# Not ru_maxrss: that begins with what the process had that started this one.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak, kept = (int(status[name].split()[0]) // 1024 for name in ("VmHWM", "VmRSS"))
print(json.dumps([answers, peak, kept, spent, longest]))
"""

HOSTILE = {
    "quotes around lines": '"<blockquote>" * 500 + "<pre>" + "\\n" * (10 * MB)',
    "lists around lines": '"<ul><li>" * 250 + "<pre>" + "a\\n" * (5 * MB)',
    "numbered lists": '"<ol start=99999999><li>" * 250 + "<p>a" * (2 * MB)',
    "quotes beyond the deepest": '"<blockquote>" * (800_000)',
    "paragraphs": '"<p>" * (3 * MB)',
    "paragraphs that stay bold": '"<b><p>" * (5 * MB // 3)',
    "headers within headers": '"<header>" * (5 * MB // 4)',
    "headings below depths": '"<header>" + "<div>" * 500 + "<h1>" * (2 * MB)',
    "a table as wide as it is long": '"<table><tr>" + "<td>" * MB + "<tr><td>" * (MB // 2)',
    "a small table of that kind": '"<table><tr>" + "<td>" * 8_000 + "<tr><td>" * 4_000',
    "tables within tables": '"<table><tr><td>" * (650_000)',
    "a wide cell": '"<table><tr><td>" + "a" * (5 * MB) + "<tr><td>b" * (MB // 2)',
    "spans": '"<table>" + "<tr><td colspan=1000 rowspan=65534>a" * (250_000)',
    "fonts that are opened again": 'fonts(400) + "<p>x" * (2 * MB)',
    "a few kilobytes of them": 'fonts(400) + "<p>x" * 15_000',
    "new fonts in each box": '"".join(f"<div><font a{i}></div>" for i in range(400_000))',
    "attributes of one body": '"".join(f"<body a{i}>" for i in range(700_000))',
    "a few kilobytes of bodies": '"".join(f"<body a{i}>" for i in range(6_000))',
    "attributes of one html": '"".join(f"<html a{i}>" for i in range(700_000))',
    "attributes": '"<p " + "".join(f"a{i} " for i in range(MB)) + ">"',
    "misnested": '"<a><div></a>" * (800_000)',
    "entities": '"&nGt;" * (2 * MB)',
    "comments": '"<!---->" * (1_400_000)',
    "drawings": '"<svg><foreignObject>" * (500_000)',
    "templates": '"<template>" * MB',
    "options": '"<select>" + "<option>" * (5 * MB // 4)',
    "end tags in the depth": '"<div>" * 500 + "</h1>" * (2 * MB)',
    "a title": '"<title>" + "a " * (5 * MB)',
    "titles of drawings": '"<svg><title>a</title></svg>" * (350_000)',
    "metas": '"".join(f"<meta name=a{i} content=x>" for i in range(350_000))',
    "links": '"".join(f"<a href={i}>" for i in range(650_000))',
    "bases": '"<base href=x>" * (750_000)',
    "pilcrows": '"<h1>" + "a ¶ " * (2 * MB)',
    "ticks": '"<code>" + "`" * (10 * MB)',
}
QUICK = {
    *(
        "a small table of that kind",
        "a few kilobytes of them",
        "a few kilobytes of bodies",
        "spans",
        "entities",
    ),
    *("headers within headers", "a title", "metas", "pilcrows", "ticks"),
}
"""One of each way to be expensive. The others take a second and a half or more of CPU each."""
ORDINARY = {
    "a specification": (
        '"<h2 id=a>Head</h2><p>Some <code>words</code> and <a href=x>more</a> of them.</p>\\n" * 75_000'
    ),
    "a table": (
        '"<table>" + "<tr><td>1</td><td>two</td><td>three</td><td>4.0</td><td>five</td></tr>\\n" * 50_000'
        ' + "</table>"'
    ),
    "a list": '"<ul>" + "<li><a href=x>one</a> of many\\n" * 200_000',
    "a listing": '"<ol><li><pre>" + "line of code\\n" * 300_000',
}


def read(document: str) -> tuple[dict[str, str], int, int, float, float]:
    done = subprocess.run(
        [sys.executable, "-c", READ, document], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers, peak, kept, spent, longest = json.loads(done.stdout)
    return answers, peak, kept, spent, longest


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HOSTILE]
)
def test_a_hostile_page_costs_a_stated_memory_and_time(name: str) -> None:
    answers, peak, kept, spent, longest = read(HOSTILE[name])
    assert set(answers.values()) <= {"ok", "page_too_complex"}
    assert peak < MEMORY
    assert kept < 400, "what the page took was not given back"
    assert spent < SECONDS
    assert longest < SECONDS / 2


@pytest.mark.parametrize("name", ORDINARY)
def test_a_large_page_is_no_hostile_page(name: str) -> None:
    answers, peak, _, _, _ = read(ORDINARY[name])
    assert set(answers.values()) == {"ok"}
    assert peak < MEMORY


def test_the_ceiling_is_gone_afterwards() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    inside = under_ceiling(lambda: "it", 1000, lambda: resource.getrlimit(resource.RLIMIT_DATA))
    assert inside != before
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with pytest.raises(FetchError, match=r"it cannot be read within 48 MB of memory") as caught:
        under_ceiling(lambda: "it", 1000, lambda: bytearray(MOST))
    assert caught.value.error == "page_too_complex"
    assert not CLASSES["page_too_complex"].retry
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert len(bytearray(MOST)) == MOST


def test_a_page_is_not_blamed_for_what_the_process_took_since_it_was_measured() -> None:
    under_ceiling(lambda: "it", 1000, lambda: None)
    meanwhile = bytearray(LEAST)
    asked = []

    def work() -> int:
        asked.append(1)
        return len(bytearray(LEAST // 2))

    assert under_ceiling(lambda: "it", 1000, work) == LEAST // 2
    assert len(asked) <= 2
    del meanwhile


def test_a_fork_does_not_live_under_it() -> None:
    """Forked while another thread is under the ceiling, and able to read pages itself."""
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        leave.wait(30)

    thread = threading.Thread(target=under_ceiling, args=(lambda: "it", 1000, work))
    thread.start()
    inside.wait(30)
    threading.Timer(0.05, leave.set).start()
    before = os.getpid()
    child = os.fork()
    if child == 0:
        free = resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
        own = under_ceiling(lambda: "it", 1000, os.getpid) != before
        os._exit(0 if free and own else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
