"""Markdown: a directory with one file per item, named after its URL, and an index.

    out.md/
      index.md                       written at the end
      example.com/index.md           https://example.com/
      example.com/docs/intro.md      https://example.com/docs/intro
      example.com/docs/a~5f0c….md    a URL that does not fit into a name: query, odd characters…

The name depends on the URL alone, so writing the same items again changes nothing. Files are complete from
the moment they are visible. The index makes the export resumable: it grows beside the files as
`.shoal-index`, with its cursor in `.shoal-cursor`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from shoal.export.files import PartFile, export_errors, replace_file, sync
from shoal.model import Item

SEGMENT = 120
"""Maximum bytes of a path segment. File systems allow 255; the rest is for suffixes."""
_KEPT = ",+=@"
_UNSAFE = re.compile(rf"[^\w. {_KEPT}-]")
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_SPECIAL = re.compile(r"([\\`*_\[\]<>])")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_YAML_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n"))
_FIRST = ("url", "final_url", "title", "description", "fetched_at")
_BODY = ("markdown", "text")
_LEFT_OUT = frozenset((*_BODY, "links", "html"))
"""Fields that are not in the front matter: they are the text itself, or would bury it."""


class Markdown:
    """An exporter that writes into the directory itself, each file atomically."""

    def __init__(self, out: Path, job: str) -> None:
        self._root = out
        self._job = job
        self._index = PartFile(out / "index.md", job, part=out / ".shoal-index", cursor=out / ".shoal-cursor")

    def open(self, seq: int) -> int:
        return self._index.open().seq

    def write(self, items: Sequence[Item]) -> None:
        at = self._index.at
        fresh = [item for item in items if item.seq > at.seq]
        if not fresh:
            return
        lines = [] if at.bytes else ["# Index\n\n"]
        written: list[Path] = []
        touched = {self._root}
        for item in fresh:
            fields = _fields(item.body)
            path = self._place(fields, item.seq)
            with export_errors(self._root / path):
                self._put(self._root / path, self._document(fields, item.seq))
            written.append(self._root / path)
            touched.update(self._root / parent for parent in path.parents)
            lines.append(_link(fields, path))
        # All are written before the first is synced, so that the file system can commit them together: 1000
        # single syncs cost seconds. Files that a power failure tears in between are beyond the cursor and
        # are written again under the same names.
        with export_errors(self._root):
            for name in (*written, *touched):
                sync(name)
        self._index.append("".join(lines).encode(errors="replace"), fresh[-1].seq)

    def finish(self) -> bool:
        return self._index.finish(b"" if self._index.at.bytes else b"# Index\n")

    def close(self) -> None:
        self._index.close()

    def _put(self, path: Path, document: bytes) -> None:
        try:
            replace_file(path, document)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, document)

    def _place(self, fields: dict[str, Any], seq: int) -> PurePosixPath:
        """Returns the path of an item's file: the name of its URL, unless another item of this job has it
        (several items of one page, two URLs with one hash)."""
        url = fields.get("url")
        path = name_of(url) if isinstance(url, str) else None
        if path is None:
            return PurePosixPath("~items", f"{seq:09}.md")
        if not self._is_taken(self._root / path, seq):
            return path
        return path.with_name(_leaf(path.name.removesuffix(".md").partition("~")[0], f"{url} {seq}"))

    def _is_taken(self, path: Path, seq: int) -> bool:
        try:
            with path.open("rb") as file:
                head = file.read(512)
        except OSError:
            return False
        return head.startswith(self._owner()) and not head.startswith(self._owner(seq))

    def _owner(self, seq: int | None = None) -> bytes:
        """Returns how each file of this job begins; with `seq`, the file of that item."""
        name = _scalar(f"{self._job}/").removesuffix('"')
        return f"---\nshoal: {name}".encode() + (b"" if seq is None else f'{seq}"\n'.encode())

    def _document(self, fields: dict[str, Any], seq: int) -> bytes:
        text = next((fields[name] for name in _BODY if isinstance(fields.get(name), str)), "")
        matter = "".join(f"{_key(name)}: {_scalar(value)}\n" for name, value in _matter(fields))
        return self._owner(seq) + f"{matter}---\n\n{text.rstrip()}\n".encode(errors="replace")


def name_of(url: str) -> PurePosixPath | None:
    """Returns the relative path of a URL's file; None if it is not a URL with a host.

    The path is always inside the directory. Two URLs share a name only if their 40-bit hashes collide: a path
    keeps its own name if each segment can be read back from it; all others get a hash of the whole URL.
    """
    try:
        parts = urlsplit(url)
        host = _host(parts.scheme, parts.netloc)
    except ValueError:
        return None
    if not host:
        return None
    *folders, leaf = parts.path.removeprefix("/").split("/")
    # Does not look at query and fragment: the splitter drops empty ones, and control characters.
    exact = url.endswith(parts.netloc + parts.path) and leaf != "index"
    names = [_segment(folder) for folder in folders]
    # Files are called something.md, so directories must not be.
    names = [f"{name[:-3]}_md" if name.endswith(".md") else name for name in names]
    last = _segment(leaf) if leaf else "index"
    exact = exact and all(map(_reads_back, names, folders)) and (not leaf or _reads_back(last, leaf))
    exact = exact and len(last.encode()) <= SEGMENT - len(".md")
    return PurePosixPath(host, *names, f"{last}.md" if exact else _leaf(last, url))


def _host(scheme: str, netloc: str) -> str:
    """Returns the directory of a host. `~` cannot be in a sanitised name, so it marks the port."""
    if scheme not in ("http", "https"):
        return ""
    name, _, port = netloc.rpartition("@")[2].lower().partition(":")
    if netloc.endswith("]") or "]:" in netloc:
        name, port = netloc.strip("[]").replace("]:", ":"), ""
    port = port or ("80" if scheme == "http" else "")
    name = _cut(_UNSAFE.sub("_", name).strip(" .-"), SEGMENT)
    return f"{name}~{_UNSAFE.sub('_', port)[:5]}" if name and port else name


def _segment(part: str) -> str:
    name = unicodedata.normalize("NFC", unquote(part, errors="replace"))
    return _cut(_UNSAFE.sub("_", name).strip(" .-"), SEGMENT) or "_"


def _reads_back(name: str, part: str) -> bool:
    return quote(name, safe=_KEPT) == part


def _leaf(name: str, identity: str) -> str:
    digest = blake2b(identity.encode(errors="surrogatepass"), digest_size=5).hexdigest()
    ending = f"~{digest}.md"
    return _cut(name, SEGMENT - len(ending)) + ending


def _cut(name: str, limit: int) -> str:
    return name.encode(errors="replace")[:limit].decode(errors="ignore")


def _fields(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {"text": body.decode(errors="replace")}
    return value if isinstance(value, dict) else {"value": value}


def _matter(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    order: Iterable[str] = dict.fromkeys((*(name for name in _FIRST if name in fields), *fields))
    for name in order:
        if name not in _LEFT_OUT and name != "shoal" and fields[name] is not None:
            yield name, fields[name]


def _scalar(value: Any) -> str:
    """Returns the value as JSON, which is YAML if a few more characters are escaped."""
    text = msgspec.json.encode(value).decode()
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _key(name: str) -> str:
    plain = _PLAIN_KEY.fullmatch(name) and name.lower() not in _YAML_WORDS
    return name if plain else _scalar(name)


def _link(fields: dict[str, Any], path: PurePosixPath) -> str:
    title = fields.get("title") or fields.get("url") or str(path)
    shown = " ".join(str(title).split())[:200]
    shown = _SPECIAL.sub(r"\\\1", shown)
    return f"- [{shown}]({quote(str(path))})\n"
