"""Tidepool Books: the bundled demo site, so that a first crawl needs no internet.

Some 25 pages made from the tables below, with the features of real sites: pagination, genres that lead to the
same books again, robots.txt, a sitemap, structured data, a dead link (/events/) and a page that has moved
(/shop).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from html import escape
from pathlib import Path

from msgspec import Struct

from shoal.demo.site import TEXT, Call, LoopbackSite, Reply

PER_PAGE = 4
NAME = "Tidepool Books"


class Book(Struct, frozen=True):
    slug: str
    title: str
    author: str
    genre: str
    year: int
    price: str
    colour: str
    blurb: str

    @property
    def path(self) -> str:
        return f"/books/{self.slug}"


BOOKS = (
    Book("the-lanternfish", "The Lanternfish", "Ines Okafor", "fiction", 2019, "14.50", "#1d3557",
         "A lighthouse keeper's daughter answers a signal that nobody sent."),
    Book("salt-and-parallel", "Salt and Parallel", "Tomas Lindqvist", "fiction", 2021, "16.00", "#457b9d",
         "Two sisters cross the same sea in opposite directions, thirty years apart."),
    Book("a-field-guide-to-fog", "A Field Guide to Fog", "Maren Aldous", "nature", 2017, "22.00", "#6c757d",
         "Forty kinds of fog, how to tell them apart, and when to stay in harbour."),
    Book("knots-for-the-undecided", "Knots for the Undecided", "Piet Haverkamp", "crafts", 2015, "12.90",
         "#bc6c25", "Sixty knots that hold and can still be undone."),
    Book("the-cartographers-cat", "The Cartographer's Cat", "Leila Marchetti", "children", 2022, "11.50",
         "#e76f51", "Every map has a blank spot. This one purrs."),
    Book("limpet", "Limpet", "Ama Boateng", "nature", 2020, "18.75", "#2a9d8f",
         "The long, quiet life of an animal that always finds its way home."),
    Book("seven-ways-to-cook-kelp", "Seven Ways to Cook Kelp", "Haruka Mori", "crafts", 2018, "24.00",
         "#606c38", "Broths, pickles and one unexpectedly good cake."),
    Book("low-water", "Low Water", "Conor Devane", "fiction", 2016, "13.20", "#264653",
         "What the tide uncovers on the morning after the village fair."),
    Book("the-octopus-who-counted", "The Octopus Who Counted", "Signe Dahl", "children", 2023, "10.95",
         "#9d4edd", "Eight arms, nine buttons, one mystery."),
    Book("winds-of-the-north-coast", "Winds of the North Coast", "Maren Aldous", "nature", 2012, "19.90",
         "#577590", "Their names, their tempers and the boats they took."),
    Book("mending-nets", "Mending Nets", "Rosa Ibarra", "crafts", 2014, "15.40", "#a98467",
         "A craft, a trade and a way to think about broken things."),
    Book("the-smallest-island", "The Smallest Island", "Leila Marchetti", "children", 2024, "12.40",
         "#f4a261", "There is room for one more. There is always room for one more."),
)  # fmt: skip

NEWS = (
    ("spring-hours", "Spring hours", "2024-03-01", "From March we open at nine, and at low tide on Sundays."),
    ("reading-with-maren-aldous", "A reading with Maren Aldous", "2024-04-12",
     "Maren reads from <a href='/books/a-field-guide-to-fog'>A Field Guide to Fog</a>. Fog is expected."),
)  # fmt: skip

_STYLE = """
:root{--ink:#16324f;--sand:#fbf7ef;--foam:#d8eef0;--coral:#e76f51}
*{box-sizing:border-box}body{margin:0;background:var(--sand);color:var(--ink);font:17px/1.6 Georgia,serif}
header{background:linear-gradient(120deg,#16324f,#2a9d8f);color:#fff;padding:1.4rem 6vw}
header a{color:#fff;margin-right:1.2rem}header strong{font-size:1.6rem;display:block}
main{max-width:62rem;margin:2rem auto;padding:0 6vw}a{color:#1b6f8a}h1{line-height:1.2}
.shelf{display:grid;grid-template-columns:repeat(auto-fill,minmax(13rem,1fr));gap:1.4rem;padding:0;list-style:none}
.shelf li{background:#fff;border-radius:.6rem;overflow:hidden;box-shadow:0 2px 10px #16324f22}
.cover{height:9rem;display:flex;align-items:end;padding:.8rem;color:#fff;font-weight:bold;font-size:1.2rem}
.shelf p{padding:0 .8rem}.price{color:var(--coral);font-weight:bold}
footer{margin-top:3rem;padding:1.4rem 6vw;background:var(--foam);font-size:.9rem}footer a{margin-right:1rem}
"""


def respond(call: Call) -> Reply:
    """The demo site as a function of the path."""
    path, origin = call.bare, f"http://{call.address}:{call.port}"
    if path == "/robots.txt":
        text = f"User-agent: *\nDisallow: /basket\nAllow: /\n\nSitemap: {origin}/sitemap.xml\n"
        return Reply(200, text.encode(), TEXT)
    if path == "/sitemap.xml":
        return Reply(200, _sitemap(origin), "application/xml")
    if path == "/style.css":
        return Reply(200, _STYLE.encode(), "text/css; charset=utf-8", etag='"style-1"')
    if path == "/shop":
        return Reply(301, headers=(("Location", "/catalogue/"),))
    page = _pages().get(path)
    if page is None:
        body = "<h1>Washed away</h1><p>There is nothing here. <a href='/'>Back to the shop</a>.</p>"
        return Reply(404, _html("Not found", "This page does not exist.", body))
    title, description, body = page
    html = _html(title, description, body)
    return Reply(200, html, etag=f'"{blake2b(html, digest_size=8).hexdigest()}"')


def pages() -> list[str]:
    """Returns the paths of all pages that return 200 with HTML, in the order of the sitemap."""
    return list(_pages())


class DemoSite(LoopbackSite):
    """Tidepool Books on a free port of 127.0.0.1, served from a thread.

    with DemoSite() as demo:
        crawl(demo.url)
    """

    def __init__(self, *, port: int = 0, log_file: Path | None = None) -> None:
        super().__init__(respond, port=port, log_file=log_file)


Page = tuple[str, str, str]


def _pages() -> dict[str, Page]:
    """Returns title, description and body by path."""
    found: dict[str, Page] = {"/": _home()}
    last = -(-len(BOOKS) // PER_PAGE)
    for number in range(1, last + 1):
        found[_catalogue_path(number)] = _catalogue(number, last)
    for genre in sorted({book.genre for book in BOOKS}):
        found[f"/genres/{genre}"] = _genre(genre)
    found.update((book.path, _book(book)) for book in BOOKS)
    found["/news/"] = _news()
    found.update((f"/news/{slug}", _story(title, day, text)) for slug, title, day, text in NEWS)
    found.update((path, page()) for path, page in _FIXED.items())
    return found


def _catalogue_path(number: int) -> str:
    return "/catalogue/" if number == 1 else f"/catalogue/page-{number}"


def _home() -> Page:
    body = (
        f"<h1>Books that smell faintly of the sea</h1><p>{NAME} is a small shop between the harbour and the"
        " rocks. Browse <a href='/catalogue/'>the catalogue</a>, look at <a href='/news/'>the news</a>, or"
        " see the old <a href='/shop'>shop page</a> and our <a href='/events/'>events</a>.</p>"
        f"<h2>New on the shelf</h2>{_shelf(sorted(BOOKS, key=lambda book: -book.year)[:4])}"
    )
    return NAME, "A small fictional bookshop by the sea.", body


def _catalogue(number: int, last: int) -> Page:
    shown = BOOKS[(number - 1) * PER_PAGE : number * PER_PAGE]
    turn = []
    if number > 1:
        turn.append(f"<a rel='prev' href='{_catalogue_path(number - 1)}'>Earlier</a>")
    if number < last:
        turn.append(f"<a rel='next' href='{_catalogue_path(number + 1)}'>More books</a>")
    body = f"<h1>Catalogue, page {number} of {last}</h1>{_shelf(shown)}<p>{' · '.join(turn)}</p>"
    return f"Catalogue, page {number}", f"Books {NAME} sells, page {number} of {last}.", body


def _genre(genre: str) -> Page:
    shown = [book for book in BOOKS if book.genre == genre]
    body = f"<h1>{genre.capitalize()}</h1>{_shelf(shown)}"
    return genre.capitalize(), f"{len(shown)} books about {genre} at {NAME}.", body


def _book(book: Book) -> Page:
    others = [other for other in BOOKS if other.genre == book.genre and other is not book]
    facts = {
        "@context": "https://schema.org",
        "@type": "Book",
        "name": book.title,
        "author": {"@type": "Person", "name": book.author},
        "datePublished": str(book.year),
        "offers": {"@type": "Offer", "price": book.price, "priceCurrency": "EUR"},
    }
    body = (
        f"<article><h1>{escape(book.title)}</h1>"
        f"<p>by <b class='author'>{escape(book.author)}</b>, {book.year}</p>"
        f"<div class='cover' style='background:{book.colour}'>{escape(book.title)}</div>"
        f"<p class='blurb'>{escape(book.blurb)}</p><p class='price'>€ {book.price}</p>"
        f"<p><a rel='nofollow' href='/basket?add={book.slug}'>Put into the basket</a> ·"
        f" More <a href='/genres/{book.genre}'>{book.genre}</a></p></article>"
        f"<h2>On the same shelf</h2>{_shelf(others)}"
        f"<script type='application/ld+json'>{json.dumps(facts)}</script>"
    )
    return f"{book.title} by {book.author}", book.blurb, body


def _shelf(books: list[Book] | tuple[Book, ...]) -> str:
    return "<ul class='shelf'>" + "".join(map(_card, books)) + "</ul>"


def _card(book: Book) -> str:
    return (
        f"<li><div class='cover' style='background:{book.colour}'>{escape(book.title)}</div>"
        f"<p><a href='{book.path}'>{escape(book.title)}</a><br>{escape(book.author)}<br>"
        f"<span class='price'>€ {book.price}</span></p></li>"
    )


def _news() -> Page:
    lines = "".join(
        f"<li><time datetime='{day}'>{day}</time> <a href='/news/{slug}'>{title}</a></li>"
        for slug, title, day, _ in NEWS
    )
    return "News", f"What is new at {NAME}.", f"<h1>News</h1><ul>{lines}</ul>"


def _story(title: str, day: str, text: str) -> Page:
    body = f"<article><h1>{title}</h1><p><time datetime='{day}'>{day}</time></p><p>{text}</p></article>"
    return title, f"{title} at {NAME}.", body


def _about() -> Page:
    body = (
        "<h1>About us</h1><p>Opened in 1987 in a former boathouse. Three rooms, one stove, some two thousand"
        " books and, at spring tide, a wet doorstep.</p><p>Find us: see <a href='/contact'>contact</a>.</p>"
    )
    return "About us", f"The story of {NAME}.", body


def _contact() -> Page:
    facts = {
        "@context": "https://schema.org",
        "@type": "BookStore",
        "name": NAME,
        "telephone": "+00 555 0142",
        "email": "hello@tidepool.example",
        "address": {
            "@type": "PostalAddress",
            "streetAddress": "3 Slipway",
            "addressLocality": "Port Anemone",
        },
        "openingHours": "Mo-Sa 09:00-18:00",
    }
    body = (
        "<h1>Contact</h1><address>Tidepool Books<br>3 Slipway<br>Port Anemone</address>"
        "<p>Call <a href='tel:+005550142'>+00 555 0142</a> or write to"
        " <a href='mailto:hello@tidepool.example'>hello@tidepool.example</a>.</p>"
        f"<p>Monday to Saturday, 9 to 18.</p><script type='application/ld+json'>{json.dumps(facts)}</script>"
    )
    return "Contact", f"Address, telephone and opening hours of {NAME}.", body


def _terms() -> Page:
    body = "<h1>Terms</h1><p>This shop is invented. Nothing is sold, nobody is charged, no book exists.</p>"
    return "Terms", f"The terms of {NAME}.", body


_FIXED: dict[str, Callable[[], Page]] = {"/about": _about, "/contact": _contact, "/terms": _terms}


def _html(title: str, description: str, body: str) -> bytes:
    whole = title if title == NAME else f"{title} · {NAME}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(whole)}</title>\n"
        f'<meta name="description" content="{escape(description)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="stylesheet" href="/style.css">\n</head>\n<body>\n'
        f'<header><strong>{NAME}</strong><nav><a href="/">Home</a><a href="/catalogue/">Catalogue</a>'
        '<a href="/genres/fiction">Fiction</a><a href="/genres/nature">Nature</a>'
        '<a href="/genres/crafts">Crafts</a><a href="/genres/children">Children</a>'
        '<a href="/news/">News</a></nav></header>\n'
        f"<main>{body}</main>\n"
        '<footer><a href="/about">About us</a><a href="/contact">Contact</a><a href="/terms">Terms</a>'
        "A fictional shop.</footer>\n</body>\n</html>\n"
    ).encode()


def _sitemap(origin: str) -> bytes:
    rows = "".join(f"<url><loc>{origin}{path}</loc></url>\n" for path in _pages())
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n'
    return f"{head}{rows}</urlset>\n".encode()
