"""The command `shoal`."""

from __future__ import annotations

import os
import sys


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its code. Errors are one line and a hint, no traceback."""
    from cyclopts import CycloptsError

    from shoal.cli import app
    from shoal.cli.common import INTERRUPTED, USAGE, fail, say
    from shoal.errors import ShoalError

    code: object = 0
    try:
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except ShoalError as error:
        code = fail(error)
    except CycloptsError as error:
        say(f"error: {str(error).strip() or type(error).__name__}")
        say(f" hint: {_help_for(sys.argv[1:] if arguments is None else arguments)} tells what it takes")
        code = USAGE
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # `shoal results JOB | head`: whoever reads has enough. Nothing may be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code if isinstance(code, int) else 0)


def _help_for(words: list[str]) -> str:
    from shoal.cli import app

    named = [words[0]] if words and words[0] in app else []
    return "`" + " ".join(["shoal", *named, "--help"]) + "`"


if __name__ == "__main__":
    main()
