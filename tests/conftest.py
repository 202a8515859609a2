"""What every test may rely on."""

from __future__ import annotations

import signal

# A shell that starts a job in the background ignores SIGINT for it, and children inherit that.
# Tests press Ctrl-C: give it back its meaning, whoever started us.
signal.signal(signal.SIGINT, signal.default_int_handler)
