"""Loads applications by name: `file.py` or `module:app`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from shoal.errors import UsageError
from shoal.scrape.hooks import Hooks
from shoal.scrape.router import Scraper


class Application:
    """The part of a `Shoal` that a session needs: its scrapers and its hooks."""

    def __init__(self) -> None:
        self.scrapers: dict[str, Scraper] = {}
        self.hooks = Hooks()


def load_app(where: str) -> Application:
    """Returns the application in `file.py` or `module:app`. Raises UsageError."""
    path, _, name = where.partition(":")
    try:
        if path.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
            if spec is None or spec.loader is None or not Path(path).is_file():
                raise UsageError(f"no file {path!r}", hint="give the path of your scrapers with --app")
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(spec.name, module)
            spec.loader.exec_module(module)
        else:
            here = str(Path.cwd())
            if here not in sys.path:
                sys.path.insert(0, here)
            module = importlib.import_module(path)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a script may call sys.exit()
        raise UsageError(
            f"cannot load {where!r}: {type(error).__name__}: {error}",
            hint="run the file by itself to see why",
        ) from error
    found = [value for value in vars(module).values() if isinstance(value, Application)]
    chosen = getattr(module, name, None) if name else (found[0] if found else None)
    if not isinstance(chosen, Application):
        raise UsageError(f"{where!r} defines no Shoal()", hint="add `app = Shoal()` to it")
    return chosen
