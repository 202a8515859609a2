"""Parts that other packages bring, by entry point: see docs/guides/extending.md.

Entry points are read only for a name that is not built in: looking through all installed packages takes
longer than `shoal --help`.
"""

from __future__ import annotations

from typing import Any

from shoal.errors import BrokenPlugin, UsageError

FRONTIERS = "shoal.frontiers"
"""A name is the scheme of an address; it loads a `registry.FrontierKind`, or a function that opens one."""
DISPATCHES = "shoal.dispatches"
"""A name is the scheme of an address; it loads a function like `registry.OpenDispatch`."""
EXPORTERS = "shoal.exporters"
"""A name is the ending of a file or the scheme of an address; it loads a `formats.MakeExporter`."""


def plugin(group: str, name: str, kind: type | None = None) -> Any:
    """What a package offers under this name, something to call or a `kind`; None if no package does. Raises
    BrokenPlugin about one that cannot be used, and UsageError if several packages offer the same name."""
    from importlib.metadata import entry_points

    # A package that is on the path twice is found twice.
    points = {(point.value, package_of(point)): point for point in entry_points(group=group, name=name)}
    if not points:
        return None
    if len(points) > 1:
        packages = ", ".join(sorted(package for _, package in points))
        raise UsageError(
            f"several packages offer {name!r} as one of {group}: {packages}",
            hint="uninstall all but one of them",
        )
    [((value, package), point)] = points.items()
    where = f"{group}: {name} = {value}"
    try:
        found = point.load()
    except Exception as error:
        raise BrokenPlugin(package, where, f"{type(error).__name__}: {error}") from error
    if not callable(found) and (kind is None or not isinstance(found, kind)):
        raise BrokenPlugin(package, where, f"{found!r} cannot be called")
    return found


def offered(group: str) -> list[str]:
    """The names that packages offer, with the package of each, for people."""
    from importlib.metadata import entry_points

    return sorted({f"{point.name} ({package_of(point)})" for point in entry_points(group=group)})


def package_of(point: Any) -> str:
    """The name of the package that an entry point belongs to."""
    return "a package without a name" if point.dist is None else str(point.dist.name)
