"""What commands print: data and tables on stdout, messages on stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from shoal.printing import STEERING, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def say(text: str) -> None:
    """Prints one line on stderr. Markup is not interpreted: text may come from the web."""
    line = as_called(printable(text))
    if not logged(line):
        print(line, file=sys.stderr, flush=True)  # noqa: T201


def pass_on(line: str) -> None:
    """Prints a line that a child process wrote to stderr. If our log is JSON, so is the child's."""
    line = printable(line)
    if is_json() and line.startswith("{"):
        print(line, file=sys.stderr, flush=True)  # noqa: T201
    else:
        say(line)


def is_live() -> bool:
    """Whether stderr is a terminal whose lines may be redrawn. A log in JSON is for programs."""
    return sys.stderr.isatty() and not is_json()


def is_json() -> bool:
    """Whether this command logs as JSON."""
    logs = _logs()
    return logs is not None and logs.is_json()


def logged(text: str, *, error: bool = False, **fields: str) -> bool:
    """Logs a message if the log is JSON. Returns False if it is not."""
    logs = _logs()
    return logs is not None and logs.write_json(text, error=error, **fields)


def _logs() -> ModuleType | None:
    """Returns the logging module if this command logs. `shoal --help` does not import it."""
    return sys.modules.get("shoal.logs")


def emit(data: Any) -> None:
    """Prints one JSON document on stdout."""
    text = json.dumps(data, ensure_ascii=False, default=str)
    print(STEERING.sub(lambda c: f"\\u{ord(c[0]):04x}", text), flush=True)  # noqa: T201


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[int] = (),
    styles: Mapping[str, str] | None = None,
) -> None:
    """Prints a table on stdout. On a terminal it fits the width; elsewhere nothing is cut off.
    `styles` are styles by the exact text of a cell."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, header in enumerate(headers):
        # The first column names the row, and people copy it: it is never wrapped.
        side: Literal["left", "right"] = "right" if number in right else "left"
        table.add_column(header, justify=side, overflow="fold", no_wrap=number == 0)
    for row in rows:
        # Text, not str: a URL with brackets in it is not markup.
        table.add_row(*(Text(printable(cell), style=(styles or {}).get(cell, "")) for cell in row))
    show(table_console(), table)


def print_facts(rows: Iterable[tuple[str, str]]) -> None:
    """Prints names and values below each other on stdout; a name that repeats is printed once."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    last = ""
    for name, value in rows:
        table.add_row(Text(printable("" if name == last else name)), Text(as_called(printable(value))))
        last = name
    show(table_console(), table)


def at_clock(moment: float, *, seconds: bool = True) -> str:
    """Returns a timestamp in local time, with the time zone: the reader may be elsewhere."""
    form = "%Y-%m-%d %H:%M:%S %Z" if seconds else "%Y-%m-%d %H:%M %Z"
    return datetime.fromtimestamp(moment).astimezone().strftime(form)


def from_now(moment: float | None, now: float) -> str:
    """Returns `in 3 s` for a moment to come, `now` for one that has passed, `-` for none."""
    if moment is None:
        return "-"
    return f"in {duration(moment - now)}" if moment > now else "now"


def duration(seconds: float) -> str:
    """Returns `90` as `1 min 30 s`: at most two units."""
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def as_called(text: str) -> str:
    """Returns text in which `shoal` commands are written as the user must type them."""
    from shoal.calling import command

    if "shoal " not in text or (ours := command()) == "shoal":
        return text
    from shoal.cli import app

    names = "|".join(name for name in app if name.isalpha())
    return re.sub(rf"(?<![\w./-])shoal(?= (?:{names})\b)", lambda _: ours, text)


def talk() -> Console:
    """Returns the console for messages: stderr, colours only on a terminal, NO_COLOR respected."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def table_console() -> Console:
    """Returns the console for tables: stdout."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def show(console: Console, table: Table) -> None:
    """Prints a table. On a terminal it fits the width; elsewhere nothing is cut off, and no line ends in
    blanks."""
    if console.is_terminal:
        console.print(table)
        return
    console.width = max(80, console.measure(table, options=console.options.update(width=100_000)).maximum)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    console.file.write("".join(f"{line.rstrip()}\n" for line in lines))
    console.file.flush()
