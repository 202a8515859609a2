"""The environment variable of each flag: `--run-id` is SHOAL_RUN_ID.

Flags that are settings are read with the settings, in the right order of sources. This module is about the
others. What a command acts on has no variable: a URL, a job as an argument, dead letters to purge.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument, ArgumentCollection

TYPED = frozenset({"demo", "command", "header", "enqueue", "after", "follow", "to"})
"""Flags that make sense for one call only. `--header` has the setting `headers`."""
CAREFUL = frozenset({"dead", "lanes", "schedule"})
"""Commands that change what other processes work on. A variable that was set for something else, such as
the job of a worker, must not select what is retried, purged or slowed down."""
HARMLESS = frozenset({"json", "quiet", "limit", "frontier"})
RIVALS = {"run_id": ("job",), "batch_size": ("concurrency",), "urls_file": ("url", "demo")}
"""A variable is ignored if one of these flags was typed: they give the same thing in another way."""
PARENT = "SHOAL_PARENT_PID"
"""As in `shoal.engine.supervisor`, which is not imported for one name."""
_OTHERS = frozenset({PARENT, "SHOAL_RUN", "SHOAL_TOKEN", "SHOAL_URL"})
"""Read by the supervisor, `scripts/start-distributed.sh` and the client."""


def variable_of(commands: tuple[str, ...], argument: Argument) -> str | None:
    """Returns the variable of a flag; None for arguments, and for flags that must be typed."""
    if not argument.field_info.is_keyword_only or not argument.show:
        return None
    name = argument.name.removeprefix("--").replace("-", "_")
    if name in TYPED or (commands[:1] == ("enqueue",) and name == "job"):
        return None  # `shoal enqueue news URL` names its job as an argument
    if commands[0] in CAREFUL and name not in HARMLESS:
        return None
    return f"SHOAL_{name.upper()}"


def from_environment(_app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Sets each flag that was not typed to the value of its variable. An empty variable counts as not set."""
    from cyclopts.argument import Token

    if os.environ.get(PARENT) == str(os.getppid()):
        return  # the supervisor passes everything by flags; the variables were meant for it
    typed = {argument.field_info.name for argument in arguments if _is_typed(argument)}
    for argument in arguments:
        if typed.intersection(RIVALS.get(argument.field_info.name, ())):
            continue
        name = None if argument.tokens else variable_of(commands, argument)
        value = os.environ.get(name, "") if name else ""
        if value and name and not is_setting(name):
            argument.append(Token(keyword=name, value=value, source="env"))


def _is_typed(argument: Argument) -> bool:
    if argument.field_info.name == "url":
        # In `shoal enqueue news` the argument is a job, not a URL.
        return any("://" in token.value for token in argument.tokens)
    return bool(argument.tokens)


def is_setting(variable: str) -> bool:
    from shoal.settings import Settings

    return variable.removeprefix("SHOAL_").lower() in Settings.model_fields


def unknown_variables(app: App) -> list[str]:
    """Returns variables that begin with `SHOAL_` and that nothing reads: most likely misspelt."""
    flags = {variable for _, _, variable in flag_variables(app)}
    ours = (name for name in os.environ if name.startswith("SHOAL_"))
    return sorted(name for name in ours if name not in flags | _OTHERS and not is_setting(name))


def flag_variables(app: App, commands: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yields every command, flag and variable."""
    for name in app:
        if name.startswith("-"):
            continue
        inner: Any = app[name]
        here = (*commands, name)
        if inner.default_command is not None:
            for argument in inner.assemble_argument_collection():
                variable = variable_of(here, argument)
                if variable is not None:
                    yield here, argument.name, variable
        yield from flag_variables(inner, here)
