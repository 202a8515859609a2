"""A page as handlers see it. The only module that uses the HTML parser.

Nothing is decoded or parsed before it is needed: a handler that reads JSON never pays for HTML. Nothing here
raises, whatever the input, except where a docstring says so, and except FetchError `page_too_complex` about a
page that needs too much memory (see `ceiling`). Bodies are decoded with replacement characters, and parsed as
browsers do.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import turbohtml
import turbohtml.detect  # registers the `whatwg-*` codecs

from shoal.errors import BadUrl, FetchError, UsageError
from shoal.model import Request, Response
from shoal.scrape.ceiling import under_ceiling
from shoal.scrape.links import MAX_LINKS, Links, canonical_href

_Answer = TypeVar("_Answer")

LIGHT = 1 << 20
HEAVY = 4 << 20
HEAVY_TAGS = 100_000
"""A page of at most LIGHT bytes is read in this process, a page of more than HEAVY bytes in a process of its
own. In between the number of its tags decides."""
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_MAX_HREFS = 4 * MAX_LINKS
"""Distinct hrefs that are read from one page: more than MAX_LINKS, because some are not links to follow."""
_ENOUGH_TEXT = 200
"""If the extracted main content has fewer characters, it may be only a teaser."""
MAX_TITLE = 1000
MAX_META = 5000
"""Characters of one `<meta>`, the description among them."""
_MAX_METAS = 1000
_BOILERPLATE = ",".join(
    (
        "nav,aside,footer,form,dialog,noscript,template,script,style,[hidden],[aria-hidden=true]",
        "[role=navigation],[role=banner],[role=contentinfo],[role=search],[role=complementary]",
        ".navbar,.navheader,.navfooter,.breadcrumb,.breadcrumbs,.sidebar,.site-header,.site-footer,.footer",
        ".cookie-banner,.skip-link",
    )
)
# Links within the page point nowhere once the text is stored; their words stay.
_MARKDOWN = turbohtml.Markdown(links=turbohtml.Markdown.Links(skip_internal=True))
_PERMALINK = re.compile(r"^(#{1,6} .*?) ?¶$", re.MULTILINE)
_META_CHARSET = re.compile(
    rb"""<meta[^>]*?charset\s*=\s*["']?\s*([a-z0-9_:.-]+)|<\?xml[^>]*?encoding\s*=\s*["']([a-z0-9_:.-]+)""",
    re.IGNORECASE,
)
_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
_HEADER_CHARSET = re.compile(r"""charset\s*=\s*["']?\s*([^\s"';,]+)""", re.IGNORECASE)
_LOOKS_LIKE_HTML = re.compile(
    rb"\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body|title|meta|script|div|p|h1|a|table)\b",
    re.IGNORECASE | re.DOTALL,
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def scrub(text: str) -> str:
    """Returns `text` with U+FFFD in place of NUL and lone surrogates, which databases and JSON refuse."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    if not text.isascii() and _SURROGATE.search(text):
        # Through UTF-16, so that a proper pair becomes the one character it stands for.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def collapse(text: str) -> str:
    """Returns `text` with one space in place of each run of white space, and none at the ends."""
    return " ".join(text.split())


@lru_cache(maxsize=512)
def _encoding(label: str) -> str:
    """Returns the WHATWG name of an encoding label, or "" if browsers do not know it.

    Python's own codec registry is not used: it has zlib_codec, utf-7 and rot13, and it remembers for ever
    each unknown name that a server invents.
    """
    if len(label) > 40:
        return ""
    try:
        return turbohtml.parse(b"", encoding=label).encoding or ""
    except (LookupError, ValueError):
        return ""


def decode(body: bytes, content_type: str = "") -> tuple[str, str]:
    """Returns the text of `body` and the WHATWG name of its encoding. Never raises.

    A byte-order mark wins over the header, and the header over `<meta>`. Without any of them the encoding is
    UTF-8 if the body is valid UTF-8, else windows-1252.
    """
    if body.startswith(b"\xef\xbb\xbf"):
        return scrub(body[3:].decode("utf-8", "replace")), "UTF-8"
    if body.startswith(b"\xff\xfe"):
        return scrub(body[2:].decode("utf-16-le", "replace")), "UTF-16LE"
    if body.startswith(b"\xfe\xff"):
        return scrub(body[2:].decode("utf-16-be", "replace")), "UTF-16BE"
    name = _declared(body, content_type)
    if name and name != "UTF-8":
        return scrub(body.decode(f"whatwg-{name}", "replace")), name
    try:
        text = body.decode("utf-8", "replace" if name else "strict")
    except UnicodeDecodeError:
        return scrub(body.decode("whatwg-windows-1252", "replace")), "windows-1252"
    # Searching bytes for NUL is many times faster than searching wide text, and UTF-8 has no surrogates.
    return text.replace("\0", "\ufffd") if b"\0" in body else text, "UTF-8"


def _declared(body: bytes, content_type: str) -> str:
    header = _HEADER_CHARSET.search(content_type)
    name = _encoding(header[1]) if header else ""
    if name:
        return name
    start = body[:1024]
    if b"<!--" in start:
        start = _COMMENT.sub(b"", start)
    meta = _META_CHARSET.search(start)
    if meta is None:
        return ""
    name = _encoding((meta[1] or meta[2]).decode("ascii", "replace"))
    if name.startswith("UTF-16"):
        return "UTF-8"  # the declaration was readable as ASCII, so it cannot be true
    return "windows-1252" if name == "x-user-defined" else name


class Element:
    """One element of a page."""

    __slots__ = ("_node",)

    def __init__(self, node: turbohtml.Element) -> None:
        self._node = node

    def __repr__(self) -> str:
        return f"<Element {self.tag} {self.text[:40]!r}>"

    @property
    def tag(self) -> str:
        return self._node.tag

    @property
    def text(self) -> str:
        """All text inside the element, with white space collapsed."""
        return collapse(self._node.text)

    @property
    def html(self) -> str:
        """The element as HTML, its own tag included."""
        return self._node.html

    @property
    def attrs(self) -> dict[str, str]:
        """All attributes; each, `class` and `rel` included, is one string."""
        return {name: self._node.attr(name) or "" for name in self._node.attrs}

    def attr(self, name: str, default: str = "") -> str:
        value = self._node.attr(name)
        return default if value is None else value

    def css(self, selector: str) -> list[Element]:
        """Returns the elements inside this one that match. Raises UsageError about a bad selector."""
        return _select(self._node, selector)

    def css_one(self, selector: str) -> Element | None:
        return _select_one(self._node, selector)

    def xpath(self, expression: str) -> list[Any]:
        """Like `Page.xpath`, relative to this element."""
        return _xpath(self._node, expression)

    def markdown(self) -> str:
        return _markdown(self._node)


class Page:
    """A fetched page, and what can be done with it.

    `url` is the URL of the response, `request` the request that led to it. `links` is the worker's own
    `Links`, so that a page profits from the pages before it.
    """

    __slots__ = ("_base", "_doc", "_hrefs", "_is_apart", "_links", "_meta", "_text", "request", "response")

    def __init__(
        self, request: Request, response: Response, links: Links | None = None, *, apart: bool = False
    ) -> None:
        self.request = request
        self.response = response
        self._links = links
        self._is_apart = apart
        self._text: tuple[str, str] | None = None
        self._doc: turbohtml.Document | None = None
        self._base: str | None = None
        self._hrefs: tuple[bool, list[str]] | None = None
        self._meta: dict[str, str] | None = None

    def __repr__(self) -> str:
        return f"<Page {self.status} {self.url}>"

    # The response

    @property
    def url(self) -> str:
        return self.response.url

    @property
    def status(self) -> int:
        return self.response.status

    @property
    def headers(self) -> dict[str, str]:
        """The headers by their lower-case names. The values of a repeated header are joined by commas."""
        joined: dict[str, str] = {}
        for name, value in self.response.headers:
            joined[name] = f"{joined[name]}, {value}" if name in joined else value
        return joined

    @property
    def body(self) -> bytes:
        return self.response.body

    @property
    def content_type(self) -> str:
        """The media type without parameters, lower-case; "" if the server sent none."""
        return self.response.header("content-type").partition(";")[0].strip().lower()

    @property
    def is_html(self) -> bool:
        kind = self.content_type
        if kind:
            return kind in _HTML_TYPES
        return _LOOKS_LIKE_HTML.match(self.response.body, 0, 1024) is not None

    @property
    def depth(self) -> int:
        return self.request.depth

    @property
    def data(self) -> dict[str, Any]:
        """A copy of the `data` that was given to `follow`."""
        return dict(self.request.data) if self.request.data else {}

    @property
    def label(self) -> str:
        return self.request.label

    @property
    def html(self) -> str:
        """The body as text, whatever its type. Never raises: bytes that cannot be decoded become U+FFFD."""
        return self._decoded()[0]

    @property
    def encoding(self) -> str:
        """The encoding of `html`, by its WHATWG name."""
        return self._decoded()[1]

    def json(self) -> Any:
        """Returns the body as JSON. Raises FetchError: `invalid_content` if it is not JSON, or
        `page_too_complex`."""
        try:
            return self._run_bounded(lambda: msgspec.json.decode(self.html))
        except (ValueError, RecursionError) as error:
            raise FetchError("invalid_content", f"{self.url} is not JSON: {error}") from None

    # Its content

    def css(self, selector: str) -> list[Element]:
        """Returns all elements that match, in document order; none if this is not HTML.

        Raises UsageError about a bad selector.
        """
        return _select(self._tree(), selector)

    def css_one(self, selector: str) -> Element | None:
        return _select_one(self._tree(), selector)

    def xpath(self, expression: str) -> list[Any]:
        """Returns the elements and strings that match. A number, string or boolean is returned in a list.

        Raises UsageError about a bad expression.
        """
        return _xpath(self._tree(), expression)

    def text(self, selector: str | None = None, default: str = "") -> str:
        """Returns the text of the first match, with white space collapsed, or `default`.

        Without a selector, the text of the whole page, except scripts and styles.
        """
        if selector is None:
            if self.is_heavy:
                return self._apart("text") or default
            text = self._run_bounded(self._tree().to_text) if self.is_html else self.html
            return collapse(text) or default
        found = self.css_one(selector)
        return default if found is None else found.text

    def texts(self, selector: str) -> list[str]:
        return [found.text for found in self.css(selector)]

    def attr(self, selector: str, name: str, default: str = "") -> str:
        """Returns an attribute of the first match, or `default`."""
        found = self.css_one(selector)
        return default if found is None else found.attr(name, default)

    @property
    def title(self) -> str:
        """The title of the page, at most 1,000 characters of it."""
        # `find` stops at the first one. Only a page whose first title is in an SVG drawing needs them all.
        node = self._tree().find("title")
        if node is not None and node.namespace is not turbohtml.Namespace.HTML:
            every = self._tree().find_all("title")
            node = next((one for one in every if one.namespace is turbohtml.Namespace.HTML), None)
        title = "" if node is None else _shortened(node.text, MAX_TITLE)
        return title or self.meta.get("og:title", "")[:MAX_TITLE]

    @property
    def description(self) -> str:
        return self.meta.get("description", "") or self.meta.get("og:description", "")

    @property
    def language(self) -> str:
        """The language that the page or the server declares (`en`, `pt-BR`); "" if neither does."""
        root = self._tree().root
        declared = (root.attr("lang") or root.attr("xml:lang") or "") if root is not None else ""
        declared = declared or self.meta.get("content-language", "")
        declared = declared or self.response.header("content-language")
        return declared.partition(",")[0].strip()[:35]

    @property
    def canonical_url(self) -> str:
        """The URL that the page declares as its own; "" if it declares none or a bad one."""
        for node in self._tree().iter_elements("link"):
            if "canonical" not in (node.attr("rel") or "").lower().split():
                continue
            try:
                return canonical_href(node.attr("href") or "", self.base)
            except BadUrl:
                return ""
        return ""

    @property
    def meta(self) -> dict[str, str]:
        """`<meta>` contents by lower-case name, property (Open Graph) or http-equiv; the first of each.

        At most 1,000 of them, and at most 5,000 characters of each.
        """
        if self._meta is None:
            found: dict[str, str] = {}
            for node in self._tree().iter_elements("meta"):
                content = node.attr("content")
                name = node.attr("name") or node.attr("property") or node.attr("http-equiv")
                if name and content:
                    found.setdefault(name.strip().lower()[:MAX_META], _shortened(content, MAX_META))
                    if len(found) >= _MAX_METAS:
                        break
            self._meta = found
        return self._meta

    def markdown(self, main: bool = True) -> str:
        """Returns the page as Markdown; with `main`, without navigation and other furniture.

        If the page declares its main content and there is enough of it, that is all. Otherwise it is
        everything but the furniture: scoring paragraphs, as reader modes do, lost a fifth of the text of
        reference pages, and losing text is worse here than keeping a menu.

        Raises FetchError `page_too_complex` if that would need too much memory.
        """
        if not self.is_html:
            return ""
        if self.is_heavy:
            return self._apart("main" if main else "whole")
        tree = self._tree()
        if not main:
            return _markdown(tree)
        declared = tree.select("main,[role=main]") or tree.select("article")
        if len(declared) == 1:
            text = _markdown(declared[0])
            if len(text) >= _ENOUGH_TEXT:
                return text
        # A copy costs less than parsing again, and handlers may still hold elements of the tree.
        bare = copy.deepcopy(tree)
        _remove_furniture(bare)
        text = _markdown(bare)
        if len(text) >= _ENOUGH_TEXT:
            return text
        whole = _markdown(tree)
        return whole if len(text) * 4 < len(whole) else text

    # Its links

    @property
    def base(self) -> str:
        """The URL that links are relative to: `<base href>` if there is a usable one, else `url`."""
        if self._base is None:
            href = next(
                (h for n in self._tree().iter_elements("base") if (h := n.attr("href")) is not None), None
            )
            self._base = self._base_from(href)
        return self._base

    def links(self, *, nofollow: bool = False) -> list[str]:
        """Returns the canonical http(s) URLs of `<a>` and `<area>`, each once, in order, at most 5,000.

        Links with `rel=nofollow` are left out unless `nofollow` is true. Links within the page (`#top`) are
        left out too.
        """
        if self._hrefs is None or self._hrefs[0] is not nofollow:
            self._hrefs = (nofollow, self._collect(nofollow))
        if self._links is None:
            self._links = Links()
        return self._links.resolve(self.base, self._hrefs[1])

    def follow(
        self,
        target: str | Element,
        *,
        label: str = "",
        priority: int | None = None,
        data: dict[str, Any] | None = None,
        delay: float = 0.0,
        ttl: float | None = None,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Request:
        """Returns a request for a link of this page, one step deeper in the same job and queue.

        `target` is a URL, which may be relative, or an element: then it is its href or src, or the href of
        the first link inside it. Raises BadUrl.
        """
        href = target if isinstance(target, str) else _href_of(target)
        return Request(
            url=canonical_href(href, self.base),
            job=self.request.job,
            label=label,
            queue=self.request.queue,
            priority=self.request.priority if priority is None else priority,
            depth=self.request.depth + 1,
            delay=delay,
            ttl=ttl,
            method=method,
            headers=dict(headers) if headers is not None else None,
            body=body,
            data=data,
        )

    def follow_all(
        self,
        selector: str,
        *,
        label: str = "",
        priority: int | None = None,
        data: dict[str, Any] | None = None,
    ) -> list[Request]:
        """Returns a request, as `follow` does, for each match; each URL once. Matches without a usable link
        are left out."""
        found: dict[str, Request] = {}
        for element in self.css(selector):
            try:
                request = self.follow(element, label=label, priority=priority, data=data)
            except BadUrl:
                continue
            found.setdefault(request.url, request)
        return list(found.values())

    # Inside

    def _decoded(self) -> tuple[str, str]:
        if self._text is None:
            self._text = decode(self.response.body, self.response.header("content-type"))
        return self._text

    def _tree(self) -> turbohtml.Document:
        if self._doc is None:
            markup = self.html if self.is_html else ""
            # Source positions are not used, and cost 5 % of the parse.
            self._doc = self._run_bounded(lambda: turbohtml.parse(markup, positions=False))
        return self._doc

    @property
    def is_heavy(self) -> bool:
        """Whether parsing this page would keep the interpreter for so long that other visits suffer.

        The parser's time and memory grow with the tags, not with the bytes: a manual of 2.5 MB on one page
        has 100,000 tags and takes 15 ms, while 2.5 MB of nothing but tags take 200 ms.
        """
        body = self.response.body
        if len(body) <= LIGHT or self._is_apart or not self.is_html:
            return False
        return len(body) > HEAVY or body.count(b"<") > HEAVY_TAGS

    def _apart(self, kind: str) -> str:
        from shoal.scrape.apart import text_apart

        return text_apart(self.response, kind)

    def _run_bounded(self, work: Callable[[], _Answer]) -> _Answer:
        if self._is_apart:
            return work()  # the process has limits of its own
        size = len(self.response.body)
        return under_ceiling(lambda: f"{self.url} ({size:,} bytes)", size, work)

    def _collect(self, nofollow: bool) -> list[str]:
        """Returns the distinct hrefs without fragments, and finds `<base>` on the same walk.

        One walk over three tags measured fastest of all: select("a[href]") needs 1.5 x, links() 3 x.
        """
        hrefs: dict[str, None] = {}
        based: str | None = None
        for node in self._tree().iter_elements(("a", "area", "base")):
            href = node.attr("href")
            if node.tag == "base":
                based = href if based is None else based
                continue
            if not href or href[0] == "#":
                continue
            if "#" in href:
                href = href.partition("#")[0]
            if href in hrefs:
                continue
            if not nofollow:
                rel = node.attr("rel")
                if rel and "nofollow" in rel.lower().split():
                    continue
            hrefs[href] = None
            if len(hrefs) >= _MAX_HREFS:
                break
        if self._base is None:
            self._base = self._base_from(based)
        return list(hrefs)

    def _base_from(self, href: str | None) -> str:
        if not href:
            return self.url
        try:
            return canonical_href(href, self.url)
        except BadUrl:
            return self.url


def _shortened(text: str, most: int) -> str:
    """Returns at most `most` characters of the collapsed `text`; perhaps fewer if it is mostly white
    space."""
    return collapse(text[: 20 * most])[:most]


def _remove_furniture(tree: turbohtml.Document) -> None:
    headers = tree.find_all("header")
    if headers:
        # The header of a site is noise, the header of an article has its title. The selector
        # `header:not(:has(h1))` would search each header again for each header around it.
        around: set[turbohtml.Node] = set()
        for title in tree.iter_elements("h1"):
            for node in title.ancestors:
                if node in around:
                    break
                around.add(node)
        for header in headers:
            if header not in around:
                header.decompose()
    tree.remove(_BOILERPLATE)


def _markdown(node: turbohtml.Node) -> str:
    text = node.to_markdown(_MARKDOWN)
    # Documentation tools end each heading with a link to itself.
    return _PERMALINK.sub(r"\1", text) if "¶" in text else text


def _href_of(element: Element) -> str:
    for name in ("href", "src"):
        href = element.attr(name)
        if href:
            return href
    inner = element.css_one("a[href]")
    if inner is None:
        raise BadUrl(element.html[:200], "url_invalid", "the element has no link")
    return inner.attr("href")


def _select(node: turbohtml.Node, selector: str) -> list[Element]:
    try:
        return [Element(found) for found in node.select(selector)]
    except ValueError as error:
        raise _bad_selector(selector, error) from None


def _select_one(node: turbohtml.Node, selector: str) -> Element | None:
    try:
        found = node.select_one(selector)
    except ValueError as error:
        raise _bad_selector(selector, error) from None
    return None if found is None else Element(found)


def _xpath(node: turbohtml.Node, expression: str) -> list[Any]:
    try:
        found = node.xpath(expression, smart_strings=False)
    except ValueError as error:
        raise UsageError(
            f"bad XPath {expression!r}: {error}", hint="for example //article//a/@href"
        ) from None
    if not isinstance(found, list):
        return [found]
    return [_unwrap(one) for one in found]


def _unwrap(found: turbohtml.Node | str) -> Element | str:
    if isinstance(found, str):
        return found
    return Element(found) if isinstance(found, turbohtml.Element) else found.text


def _bad_selector(selector: str, error: ValueError) -> UsageError:
    # People who know parsel try `::text` and `::attr(x)` first.
    return UsageError(
        f"bad CSS selector {selector!r}: {error}",
        hint="use .text and .attr(name) for text and attributes",
    )
