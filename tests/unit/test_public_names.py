"""What `import shoal` shows is what it promises, and it is typed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import shoal


def test_every_promised_name_is_there() -> None:
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None, name


def test_nothing_else_is_offered() -> None:
    assert shoal.__all__ == sorted(shoal.__all__)
    shown = subprocess.run(
        [sys.executable, "-c", "from shoal import *; print(*sorted(set(dir()) - {'__annotations__'}))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    ours = {name for name in shown if not (name.startswith("__") and name != "__version__")}
    assert ours == set(shoal.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(shoal, "Spider")


def test_the_types_are_shipped() -> None:
    assert (Path(shoal.__file__).parent / "py.typed").is_file()


def test_the_version_is_that_of_the_package() -> None:
    assert shoal.__version__ == version("shoal")


def test_importing_it_is_cheap() -> None:
    """The heavy parts come when they are used; `shoal --help` relies on it."""
    heavy = "{'pycurl', 'apsw', 'turbohtml', 'pydantic', 'shoal.app'}"
    code = f"import sys, shoal, shoal.cli; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
