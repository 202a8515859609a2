"""Makes docs/reference/ from the code, so that it cannot be wrong: settings, errors, commands.

python scripts/make_reference.py           write the pages
python scripts/make_reference.py --check   name those that are not up to date, exit 1
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import cyclopts
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shoal import errors
from shoal.cli import app
from shoal.cli.variables import flag_variables, is_setting
from shoal.registry import VARIABLES
from shoal.settings import FOREIGN, Settings, variables

HERE = Path(__file__).resolve().parent.parent / "docs/reference"
MADE = "<!-- Made by scripts/make_reference.py. Change the code, then `make docs`. -->\n\n"

EXIT_CODES = {
    0: "Done.",
    1: "Done, but some URLs ended dead.",
    2: "Bad usage: an argument, a setting or a file.",
    3: "Nothing could be fetched.",
    4: "A needed server (frontier or broker) is unreachable, or the frontier locked, damaged or full.",
    130: "Interrupted by Ctrl-C (SIGINT), also when everything under way was finished. `--resume` goes on."
    " What runs until it is stopped (`worker`, `pump`, `serve`, `up`) exits with 0 after SIGTERM.",
}
GROUPS = {
    "timeout": "Something took too long.",
    "connection": "No connection, or it broke.",
    "http": "The server answered, and not with a page.",
    "content": "What came is not a usable page.",
    "refused": "shoal does not go there.",
    "scraper": "The scraper's own code.",
    "internal": "shoal's own trouble.",
}


def main() -> int:
    stale = [name for name, text in pages().items() if _read(HERE / name) != text]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs/reference/{name} is not up to date: run `make docs`")
        return 1 if stale else 0
    HERE.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (HERE / name).write_text(pages()[name], encoding="utf-8")
        print(f"docs/reference/{name}")
    return 0


def pages() -> dict[str, str]:
    """File name to text."""
    return {"settings.md": settings_page(), "errors.md": errors_page(), "cli.md": cli_page()}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


# -- settings -------------------------------------------------------------------------


def settings_page() -> str:
    head = (
        "# Settings\n\n"
        "One table. A value comes from, in this order: a flag or an argument, the environment,\n"
        "`shoal.toml` in the current folder, `[tool.shoal]` in `pyproject.toml`, the default.\n\n"
        '```toml\n# shoal.toml\nrate = "2/s"\nmax_pages = 500\nexclude = ["*/login*"]\n```\n\n'
        "In the environment and in flags a list is written `a,b`. A name that is no setting is refused in\n"
        "files and in Python; `shoal doctor` remarks `SHOAL_` variables that nothing reads. No other\n"
        "variables count than those named below and those of [flags](cli.md#variables-of-flags).\n"
    )
    settings = "".join(_setting(name, field) for name, field in Settings.model_fields.items())
    return MADE + head + settings + _foreign()


def _foreign() -> str:
    """Variables that others named. All of them are read; none of them begins with `SHOAL_`."""
    rows = [
        f"| `{theirs}` | the setting [{name}](#{name}) | `SHOAL_{name.upper()}` wins |"
        for name, theirs in FOREIGN.items()
    ]
    rows += [
        f"| `{name}` | {where} without a host | {f'default `{default}`' if default else 'default none'} |"
        for name, (default, where) in VARIABLES.items()
    ]
    return (
        "\n## Variables of other systems\n\n"
        "These count too. An address that names its host takes nothing from them.\n\n"
        "| variable | means | |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def _setting(name: str, field: FieldInfo) -> str:
    default = _shown(field.get_default(call_default_factory=True))
    rows = [f"default {default}", f"type `{_type(field.annotation)}`"]
    rows += [f"at least {limit.ge:,}" for limit in field.metadata if getattr(limit, "ge", None) is not None]
    rows += [f"above {limit.gt:,}" for limit in field.metadata if getattr(limit, "gt", None) is not None]
    rows += [f"at most {limit.le:,}" for limit in field.metadata if getattr(limit, "le", None) is not None]
    names = ", ".join(f"`{variable}`" for variable in variables(name))
    return f"\n## {name}\n\n{field.description}\n\n{', '.join(rows)}. Environment: {names}.\n"


def _shown(value: Any) -> str:
    if value in (None, "", (), {}, PydanticUndefined):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    if isinstance(annotation, UnionType):
        return " | ".join(_type(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is tuple:
        return "list of text" if get_args(annotation)[0] is str else "list of tables"
    if get_origin(annotation) is dict:
        return "table of text"
    return {str: "text", bool: "on or off", int: "whole number", float: "number"}.get(
        annotation, str(annotation)
    )


# -- errors ---------------------------------------------------------------------------


def errors_page() -> str:
    tree = inspect.getdoc(errors) or ""
    lines = [
        "# Errors",
        "",
        "Every failed visit has one class. `shoal dead list --error CLASS` and the counters use these names.",
        "*Tried again* means: as often as [retries](settings.md#retries) says.",
        "*Host rests* means: the whole host is left alone for a while, or for as long as `Retry-After` says.",
        "",
        "An HTTP status that is no success is `http_` and the status; one without a row of its own is",
        "treated like its family, `http_4xx` or `http_5xx`.",
    ]
    for group, meaning in GROUPS.items():
        lines += ["", f"## {group}", "", meaning, "", "| class | tried again | host rests |", "|---|---|---|"]
        for name, kind in errors.CLASSES.items():
            if kind.group == group:
                lines.append(f"| `{name}` | {_yes(kind.retry)} | {_yes(kind.slows)} |")
    lines += ["", "## Exceptions", "", "```text", tree.partition("\n\n")[2], "```", ""]
    return MADE + "\n".join(lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


# -- commands -------------------------------------------------------------------------


def cli_page() -> str:
    lines = [
        "# Commands",
        "",
        "Data goes to stdout, talk to stderr. `--json` makes it machine-readable. `NO_COLOR` is respected.",
        "A flag of `crawl` can also be [a setting](settings.md).",
        "",
        "| exit code | means |",
        "|---|---|",
        *(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()),
    ]
    lines += ["", "## Variables of flags", "", *_variables()]
    for path, command in commands():
        lines += ["", f"## {' '.join(path)}", "", _command(path, command)]
    return MADE + "\n".join(lines) + "\n"


def _variables() -> list[str]:
    found: dict[str, list[str]] = {}
    for path, flag, variable in flag_variables(app):
        if not is_setting(variable):
            found.setdefault(variable, []).append(f"{' '.join(path)} {flag}")
    return [
        "A flag that is a [setting](settings.md) has that setting's variable. These have one too; a typed",
        "flag wins, and an empty variable says nothing. `1` turns on, `0` off. What is in neither list is",
        "always typed: what a command acts on, and what is retried, thrown away, slowed down or moved. So is",
        "`--scope` of `enqueue` and `discover`, which do not follow the setting of `crawl`.",
        "",
        "| variable | flag of |",
        "|---|---|",
        *(f"| `{name}` | {_users(uses)} |" for name, uses in sorted(found.items())),
    ]


def _users(uses: list[str]) -> str:
    return "every command that has it" if len(uses) > 8 else ", ".join(f"`{use}`" for use in uses)


def commands(
    parent: cyclopts.App = app, path: tuple[str, ...] = ("shoal",)
) -> Iterator[tuple[tuple[str, ...], cyclopts.App]]:
    """Every command with its words, in the order of `--help`."""
    for name in parent:
        if name.startswith("-"):
            continue
        command = parent[name]
        here = (*path, name)
        inner = list(commands(command, here))
        if not inner or command.default_command is not None:
            yield here, command
        yield from inner


def _command(path: tuple[str, ...], command: cyclopts.App) -> str:
    text = command.generate_docs(recursive=False, usage_name="shoal")
    text = re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0]  # its own commands follow by themselves
    usage = re.search(r"```console\n(.*?)\n```", text, re.DOTALL)
    parameters = re.search(r"^\*\*(Arguments|Parameters)\*\*:.*", text, re.DOTALL | re.MULTILINE)
    said = (
        inspect.getdoc(command.default_command) or command.help if command.default_command else command.help
    )
    story = re.split(r"\n\s*Parameters\n\s*-+\n", str(said))[0].strip()
    # Only what follows the names: how cyclopts names the program depends on how we were started.
    takes = re.search(r"(?<!\S)(\[|--|[A-Z]).*", usage[1]) if usage else None
    line = " ".join([*path, takes[0] if takes else ""]).strip()
    flags = parameters[0].strip() if parameters else ""
    # `--empty-include` and its like exist for symmetry only; nobody types them.
    flags = re.sub(r", --(?:empty|no)-[a-z-]+`", "`", flags)
    flags = re.sub(r"\*\*(Arguments|Parameters)\*\*:\n\n", "", flags)
    flags = re.sub(r" \*\[default: (False|None)\]\*", "", flags)
    flags = re.sub(r"\n{2,}", "\n", flags)
    return f"```console\n{line}\n```\n\n{story}\n\n{flags}".strip()


if __name__ == "__main__":
    sys.exit(main())
