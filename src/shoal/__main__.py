"""The command `shoal`."""

from __future__ import annotations

import os
import signal
import sys


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits with its code. An error is one line and a hint, not a traceback."""
    code: object = 0
    try:
        code = _run(arguments)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # `shoal results JOB | head`: the reader has closed the pipe. Nothing may be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if arguments is None:
        # The command is over, so a Ctrl-C from here on must not change its exit code. Only where this
        # process is the command: a caller that passes arguments continues, and needs its Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code if isinstance(code, int) else 0)


def _run(arguments: list[str] | None) -> object:
    from cyclopts import CycloptsError

    from shoal.cli import app, show_docstring
    from shoal.cli.common import USAGE, fail
    from shoal.cli.output import say
    from shoal.errors import ShoalError

    words = sys.argv[1:] if arguments is None else arguments
    show_docstring(words)
    try:
        code: object = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except ShoalError as error:
        return fail(error)
    except CycloptsError as error:
        say(f"error: {str(error).strip() or type(error).__name__}")
        say(f" hint: see {_help_for(words)}")
        return USAGE
    finally:
        if logs := sys.modules.get("shoal.logs"):
            logs.tear_down()
    return code


def _help_for(words: list[str]) -> str:
    from shoal.cli import app

    named = [words[0]] if words and words[0] in app else []
    return "`" + " ".join(["shoal", *named, "--help"]) + "`"


if __name__ == "__main__":
    main()
