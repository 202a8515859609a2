"""Reading URLs from files that people really have."""

from __future__ import annotations

import gzip
import io
import tracemalloc
from pathlib import Path

import pytest

from shoal.discover.urlfile import read_urls
from shoal.errors import BadUrl, UsageError
from shoal.urls import canonical


def put(tmp_path: Path, data: bytes, name: str = "urls.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def test_blank_lines_comments_bom_and_crlf_are_not_urls(tmp_path: Path) -> None:
    path = put(tmp_path, b"\xef\xbb\xbfhttp://a/\r\n\r\n# note\n  http://b/  \n   # indented\nhttp://c/#frag")
    assert list(read_urls(path)) == ["http://a/", "http://b/", "http://c/#frag"]


def test_a_bom_before_an_empty_first_line(tmp_path: Path) -> None:
    assert list(read_urls(put(tmp_path, b"\xef\xbb\xbf\nhttp://a/\n"))) == ["http://a/"]
    assert list(read_urls(put(tmp_path, b"\xef\xbb\xbf"))) == []


def test_streams_stay_open() -> None:
    stream = io.BytesIO(b"http://a/\nhttp://b/\n")
    assert list(read_urls(stream)) == ["http://a/", "http://b/"]
    assert not stream.closed


@pytest.mark.parametrize("name", ["urls.txt.gz", "urls.txt"])
def test_gzip_is_known_by_content(tmp_path: Path, name: str) -> None:
    path = put(tmp_path, gzip.compress(b"http://a/\n" * 3), name)
    assert list(read_urls(path)) == ["http://a/"] * 3


def test_gzip_on_standard_input() -> None:
    stream = io.BufferedReader(io.BytesIO(gzip.compress(b"http://a/\n")))
    assert list(read_urls(stream)) == ["http://a/"]
    stream.close()


def test_torn_gzip_gives_what_it_has_and_then_a_usage_error(tmp_path: Path) -> None:
    path = put(tmp_path, gzip.compress(b"http://a/\n" * 10)[:-4], "u.gz")
    with pytest.raises(UsageError, match="damaged"):
        list(read_urls(path))


@pytest.mark.parametrize(
    "line", [b"http://a/" + b"x" * 5_000_000, b"http://a/" + "\U0001f41f".encode() * 90_000]
)
def test_an_overlong_line_becomes_a_bad_url_and_nothing_else(tmp_path: Path, line: bytes) -> None:
    found = list(read_urls(put(tmp_path, line + b"\nhttp://b/\n")))
    assert found[1:] == ["http://b/"]
    with pytest.raises(BadUrl) as refused:
        canonical(found[0])
    assert refused.value.error == "url_too_long"


def test_undecodable_bytes_are_replaced(tmp_path: Path) -> None:
    assert list(read_urls(put(tmp_path, b"http://a/\xff\xe9\nhttp://b/\n"))) == [
        "http://a/\ufffd\ufffd",
        "http://b/",
    ]


def test_csv_first_column_with_header_and_quotes(tmp_path: Path) -> None:
    data = b'url,title\n"http://a/?x=1,2","two\nlines"\nhttp://b/,\n\n'
    assert list(read_urls(put(tmp_path, data, "list.CSV"))) == ["http://a/?x=1,2", "http://b/"]
    assert list(read_urls(put(tmp_path, b"http://a/,t\nhttp://b/,t\n", "n.csv"))) == [
        "http://a/",
        "http://b/",
    ]


def test_csv_with_an_open_quote_is_a_usage_error(tmp_path: Path) -> None:
    path = put(tmp_path, b'http://a/,"open\n' + b"http://b/,x\n" * 20_000, "bad.csv")
    with pytest.raises(UsageError, match="CSV"):
        list(read_urls(path))


def test_unreadable_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read") as refused:
        list(read_urls(tmp_path / "missing"))
    assert refused.value.hint
    with pytest.raises(UsageError, match="cannot read"):
        list(read_urls(tmp_path))
    with pytest.raises(UsageError, match="UTF-16"):
        list(read_urls(put(tmp_path, "http://a/\n".encode("utf-16"))))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = put(tmp_path, b"http://a/\n" * 300_000 + b"y" * 8_000_000)
    tracemalloc.start()
    count = sum(1 for _ in read_urls(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 300_001
    assert peak < 2_000_000
