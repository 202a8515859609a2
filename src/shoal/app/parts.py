"""Objects in the place of addresses: a frontier, a dispatch or a fetcher that a user made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from shoal.dispatch.port import Dispatch
from shoal.errors import UsageError
from shoal.fetch.port import Fetcher
from shoal.frontier.port import Backend


class Parts(Struct, frozen=True):
    """Objects that a user gave. They belong to that user: nothing here closes them, so that one of them can
    serve several crawls."""

    frontier: Backend | None = None
    dispatch: Dispatch | None = None
    fetcher: Fetcher | None = None

    def taken_from(self, given: Mapping[str, Any]) -> tuple[Parts, dict[str, Any]]:
        """These parts with the objects among `given` instead, and the rest of what was given: settings.

        An address replaces an object as well. Raises UsageError about an object that is not such a part.
        """
        objects: dict[str, Any] = {}
        for name, verb in _VERBS.items():
            value = given.get(name)
            if value is None:
                continue
            if not isinstance(value, str):
                if isinstance(value, type) or not callable(getattr(value, verb, None)):
                    raise UsageError(f"{name}={value!r} is no {name}", hint=f"see shoal.{_PORTS[name]}")
                objects[name] = value
            elif name == "fetcher":
                raise UsageError(f"there is no fetcher {value!r}", hint="give an object, or leave it out")
            else:
                objects[name] = None
        rest = {name: value for name, value in given.items() if objects.get(name) is None}
        return msgspec.structs.replace(self, **objects), rest


_VERBS = {"frontier": "claim", "dispatch": "receive", "fetcher": "fetch"}
"""A verb that tells an object of each kind from anything else."""
_PORTS = {
    "frontier": "frontier.port.Backend",
    "dispatch": "dispatch.port.Dispatch",
    "fetcher": "fetch.port.Fetcher",
}
