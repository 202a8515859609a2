"""What every test may rely on."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# A shell that starts a job in the background ignores SIGINT for it, and children inherit that.
# Tests press Ctrl-C: give it back its meaning, whoever started us.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` looks at a few random examples, the same each time; `make test-all` at many.
# No deadlines: they measure the machine.
settings.register_profile("few", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("whole", max_examples=250, deadline=None)
settings.load_profile("whole" if os.environ.get("SHOAL_HYPOTHESIS") else "few")
