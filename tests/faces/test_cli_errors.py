"""Whatever is wrong, a command says it in one line with a way out, and exits as documented.

Exit codes: 2 bad usage, 3 nothing could be fetched, 4 the frontier cannot serve.
"""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.__main__ import main

# Every command that opens the frontier, as it would be right: those that make none if there is none…
ASKING: list[tuple[str, ...]] = [
    ("jobs",),
    ("status", "j"),
    ("watch", "j"),
    ("cancel", "j"),
    ("pause", "j"),
    ("resume", "j"),
    ("results", "j"),
    ("export", "j", "--to", "out.jsonl"),
    ("dead",),
    ("dead", "list", "--urls"),
    ("dead", "show", "1"),
    ("dead", "retry", "--all"),
    ("dead", "purge", "--all"),
    ("lanes",),
    ("workers",),
    ("schedule",),
    ("schedule", "remove", "s"),
    ("schedule", "pause", "s"),
    ("schedule", "run", "s"),
    ("explain", "http://a.test/"),
]
# … and those that do.
MAKING: list[tuple[str, ...]] = [
    ("lanes", "set", "a.test", "--rate", "1/s"),
    ("lanes", "unset", "a.test"),
    ("lanes", "pause", "a.test"),
    ("lanes", "resume", "a.test"),
    ("enqueue", "j", "http://a.test/"),
    ("schedule", "add", "s", "http://a.test/", "--every", "1h"),
    ("schedule", "run", "--once"),
    ("worker", "--drain"),
    ("up",),
    ("migrate",),
    ("crawl", "http://a.test/"),
]

WITHOUT_JOB: list[tuple[str, ...]] = [
    ("status", "nope"),
    ("watch", "nope"),
    ("cancel", "nope"),
    ("pause", "nope"),
    ("resume", "nope"),
    ("results", "nope"),
    ("results", "nope", "--follow"),
    ("export", "nope", "--to", "out.jsonl"),
    ("dead", "list", "--job", "nope"),
    ("dead", "show", "1", "--job", "nope"),
    ("dead", "retry", "--job", "nope"),
    ("dead", "purge", "--job", "nope"),
    ("explain", "http://a.test/", "--job", "nope"),
    ("worker", "--drain", "--job", "nope"),
]

BAD_INPUT: list[tuple[tuple[str, ...], str]] = [
    (("jobs", "--limit", "0"), "--limit"),
    (("jobs", "--limit", "many"), "--limit"),
    (("jobs", "--no-such-option"), "--no-such-option"),
    (("nonsense",), "nonsense"),
    (("status",), "job"),
    (("results", "j", "--limit", "0"), "--limit"),
    (("results", "j", "--after", "-1"), "--after"),
    (("export", "j"), "--to"),
    (("dead", "nonsense"), "nonsense"),
    (("dead", "list", "--error", "nonsense"), "unknown error class"),
    (("dead", "list", "--error", "http_4xx"), "group of classes"),
    (("dead", "list", "--host", "a b"), "bad host"),
    (("dead", "list", "--host", "a.test/path"), "bad host"),
    (("dead", "show", "12345"), "no dead letter"),
    (("dead", "show", "99999999999999999999999"), "no dead letter"),
    (("dead", "show", "http://a.test/"), "no dead letter"),
    (("dead", "retry"), "no dead letters selected to retry"),
    (("dead", "purge"), "no dead letters selected to purge"),
    (("dead", "retry", "--id", "x"), "--id"),
    (("dead", "retry", "--id", "-4"), "--id"),
    (("lanes", "set", "a.test"), "nothing to set"),
    (("lanes", "set", "a.test", "--rate", "fast"), "bad rate 'fast'"),
    (("lanes", "set", "a.test", "--rate", "0/s"), "bad rate"),
    (("lanes", "set", "a.test", "--concurrency", "0"), "--concurrency"),
    (("lanes", "set", "a.test", "--burst", "-1"), "--burst"),
    (("lanes", "set", "ftp://a.test/", "--rate", "1/s"), "bad host"),
    (("lanes", "pause", ""), "bad host"),
    (("lanes", "pause"), "host"),
    (("explain", "a.test"), "the scheme is missing"),
    (("explain", "ftp://a.test/"), "scheme"),
    (("explain", "http://u:p@a.test/"), "user name"),
    (("doctor", "--limit", "1"), "--limit"),
    (("bench", "--seconds", "0"), "--seconds"),
    (("bench", "--seconds", "soon"), "--seconds"),
    (("shell", "a.test"), "the scheme is missing"),
    (("shell",), "url"),
    (("init", "folder/x", "--nonsense"), "--nonsense"),
    (("up", "--workers", "0"), "--workers"),
    (("up", "--concurrency", "0"), "--concurrency"),
    (("up", "--lease", "0"), "--lease"),
    (("serve", "--workers", "-1"), "--workers"),
    (("serve", "--concurrency", "0"), "--concurrency"),
    (("worker", "--concurrency", "0"), "--concurrency"),
    (("worker", "--batch-size", "0"), "--batch-size"),
    (("worker", "--batch-size", "-5"), "--batch-size"),
    (("worker", "--batch-size", "2001"), "--batch-size"),
    (("worker", "--lease", "0"), "--lease"),
    (("run", "books", "--concurrency", "0"), "--concurrency"),
    (("run", "books", "--limit", "0"), "--limit"),
    (("crawl", "http://a.test/", "--workers", "0"), "--workers"),
    (("crawl", "http://a.test/", "--max-pages", "0"), "--max-pages"),
    (("crawl", "http://a.test/", "--retries", "-1"), "--retries"),
    (("crawl", "http://a.test/", "--timeout", "0"), "--timeout"),
    (("crawl", "--demo", "--per-host", "0"), "--per-host"),
    (("enqueue", "j", "http://a.test/", "--per-host", "0"), "--per-host"),
    (("up", "--frontier", "memory:"), "memory:"),
    (("up", "--app", "missing.py"), "missing.py"),
    (("migrate", "--frontier", "memory:"), "memory:"),
    (("run", "books"), "no scraper"),
    (("run", "books", "a.test"), "the scheme is missing"),
    (("crawl",), "no URL to start from"),
    (("crawl", "a.test"), "the scheme is missing"),
    (("crawl", "http://a.test/", "--rate", "fast"), "bad rate"),
    (("crawl", "http://a.test/", "--out", "x.doc"), "cannot export"),
    (("crawl", "http://a.test/", "--include", "re:("), "bad pattern"),
    (("crawl", "http://a.test/", "--fields", "nonsense"), "nonsense"),
    (("crawl", "http://a.test/", "--header", "novalue"), "bad header"),
    (("enqueue", "j", "http://a.test/", "--priority", "10"), "priority"),
    (("enqueue", "j", "http://a.test/", "--ttl", "0"), "ttl"),
    (("enqueue", "j", "--urls-file", "missing.txt"), "missing.txt"),
    (("enqueue", "j", "--urls-file", "folder"), "folder"),
    (("jobs", "--frontier", "ftp://x"), "unsupported frontier address"),
    (("migrate", "--frontier", "mysql://u:topsecret@h/x"), "mysql://u:***@h/x"),
    (("jobs", "--frontier", "postgresql://u:top/secret@h/x"), "postgresql://***@h/x"),
    (("jobs", "--frontier", "postgresql://u:topsecret@127.0.0.1:1/x?sslmode=bogus"), "sslmode"),
    (("jobs", "--frontier", "redis://:topsecret@127.0.0.1:1/abc"), "the database must be a number"),
    (("crawl", "http://a.test/", "--frontier", "sqlite:///x.db?synchronous=off"), "synchronous"),
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("SHOAL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code and the one error line; anything but that line and its hint is a failure."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    ran = capsys.readouterr()
    assert ran.out == ""
    lines = ran.err.splitlines()
    assert lines and lines[0].startswith("error: "), ran.err
    assert len(lines) == 2 and lines[1].startswith(" hint: "), ran.err
    return int(ended.value.code or 0), lines[0]


@pytest.mark.parametrize("words", WITHOUT_JOB, ids=" ".join)
def test_no_such_job(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], place: Path) -> None:
    assert told(capsys, *words) == (2, "error: no job 'nope'")
    assert not (place / "out.jsonl").exists()


@pytest.mark.parametrize(("words", "part"), BAD_INPUT, ids=[" ".join(words) for words, _ in BAD_INPUT])
def test_bad_input(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], part: str) -> None:
    code, line = told(capsys, *words)
    assert code == 2
    assert part.lower() in line.lower()
    assert "secret" not in line


WITH_APP: list[tuple[str, ...]] = [
    ("worker", "--drain"),
    ("worker", "--drain", "--quiet"),
    ("run", "books"),
    ("scrapers",),
    ("serve", "--port", "0"),
    ("up", "--port", "0"),
    ("schedule", "add", "s", "http://a.test/", "--every", "1h"),
    ("schedule", "run", "--once"),
]


@pytest.mark.parametrize("words", WITH_APP, ids=" ".join)
@pytest.mark.parametrize("app", ["nosuch.py", "nosuch.py:app", "nosuch:app", "broken.py", "empty.py"])
def test_an_application_that_cannot_be_had(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: Path,
    words: tuple[str, ...],
    app: str,
) -> None:
    (place / "broken.py").write_text("1 / 0\n")
    (place / "empty.py").write_text("")
    code, line = told(capsys, *words, "--app", app)
    assert code == 2 and app.partition(":")[0] in line, line
    monkeypatch.setenv("SHOAL_APP", app)
    assert told(capsys, *words) == (2, line)


def corrupt(place: Path) -> str:
    (place / "f.db").write_bytes(b"this is no database, and never was one " * 100)
    return "sqlite:///f.db"


def something_else(place: Path) -> str:
    db = sqlite3.connect(place / "f.db")
    db.execute("CREATE TABLE cats(name)")
    db.commit()
    db.close()
    return "sqlite:///f.db"


def directory(place: Path) -> str:
    return "sqlite:///folder"


def below_a_file(place: Path) -> str:
    (place / "file").write_text("")
    return "sqlite:///file/f.db"


def nowhere_to_write(place: Path) -> str:
    # Even root may not make files here, so this is a read-only place for everybody.
    return "sqlite:////proc/shoal/f.db"


@pytest.mark.parametrize("words", ASKING + MAKING, ids=" ".join)
@pytest.mark.parametrize("broken", [corrupt, something_else, directory, below_a_file, nowhere_to_write])
def test_a_frontier_that_cannot_serve(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], broken: object, place: Path
) -> None:
    assert callable(broken)
    code, line = told(capsys, *words, "--frontier", broken(place))
    # Who only asks cannot tell a place where nothing could be made from one where nothing was.
    absent = broken in (below_a_file, nowhere_to_write) and words in ASKING
    assert code == (2 if absent else 4)
    assert "f.db" in line or "folder" in line


@pytest.mark.parametrize("words", ASKING, ids=" ".join)
@pytest.mark.parametrize("where", ["sqlite:///new.db", "sqlite:///new/f.db", "new.db"])
def test_asking_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], where: str, place: Path
) -> None:
    code, line = told(capsys, *words, "--frontier", where)
    assert code == 2
    assert "there is no frontier at new" in line
    assert [path.name for path in place.iterdir()] == ["folder"]


@pytest.mark.parametrize("broken", [corrupt, something_else, directory, below_a_file, nowhere_to_write])
def test_doctor_names_the_broken_frontier(
    capsys: pytest.CaptureFixture[str], broken: object, place: Path
) -> None:
    assert callable(broken)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--frontier", broken(place)])
    ran = capsys.readouterr()
    assert ended.value.code == 4
    assert any(line.split()[:2] == ["bad", "frontier"] for line in ran.out.splitlines())
    assert "frontier: " in ran.err


def test_a_locked_frontier(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    # In a process of its own: file locks do not hold against the process that has them.
    hold = "import sqlite3,sys; d=sqlite3.connect('f.db',isolation_level=None); d.execute('BEGIN EXCLUSIVE')"
    command = [sys.executable, "-c", f"{hold}; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        code, line = told(capsys, "jobs", "--frontier", "sqlite:///f.db")
        holder.communicate()
    assert code == 4
    assert "locked" in line


def test_settings_that_cannot_be_read(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    (place / "shoal.toml").write_text("rate = [")
    code, line = told(capsys, "jobs")
    assert code == 2 and "settings" in line
    (place / "shoal.toml").write_text('rate = "fast"')
    code, line = told(capsys, "jobs")
    assert code == 2 and "bad rate" in line


@pytest.mark.parametrize("out", ["folder", "folder/x/../../file/out.jsonl", "/proc/shoal/out.jsonl"])
def test_an_export_that_cannot_be_written(capsys: pytest.CaptureFixture[str], place: Path, out: str) -> None:
    (place / "file").write_text("")
    with pytest.raises(SystemExit):
        main(["enqueue", "j", "http://a.test/"])
    capsys.readouterr()
    code, line = told(capsys, "export", "j", "--to", out)
    assert code == 2
    assert "cannot" in line


def test_help_is_instant() -> None:
    """0.3 s on an ordinary machine. How slow this one is, is told by the two libraries that print any help:
    they are most of what `--help` costs."""

    def cpu(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    libraries = "import cyclopts, cyclopts.help, docstring_parser, rich.console, rich.table"
    runs = [(cpu("-c", libraries), cpu("-m", "shoal", "--help")) for _ in range(5)]
    theirs, spent = (min(column) for column in zip(*runs, strict=True))
    assert spent < 1.9 * theirs, f"{spent:.2f} s of CPU, the libraries alone {theirs:.2f}"


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("jobs", "--help"), ("dead", "--help")])
def test_help_imports_nothing_heavy(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "shoal", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines() if "|" in line}
    heavy = {"pycurl", "turbohtml", "apsw", "pydantic", "pydantic_settings", "ada_url"}
    heavy |= {"structlog", "publicsuffixlist", "shoal.app", "shoal.settings", "shoal.demo"}
    if words == ("--help",):
        heavy.add("asyncio")  # commands may have a loop; the list of them has nothing to run
    assert imported & heavy == set()
    # Help itself is drawn with rich; what draws no table must not load it.
    assert words != ("--version",) or "rich.table" not in imported
