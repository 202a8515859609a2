"""Time as a dependency, so that tests can move it."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns the wall-clock time in seconds since the epoch."""

system: Clock = time.time
