"""A worker that slept past its leases comes back: what it still has to say is refused and counted."""

from __future__ import annotations

import signal
from collections import Counter

from shoal.demo.site import Call, LoopbackSite, Reply
from shoal.model import JobState
from tests.rig.command import Shell, wait_until

LEASE = 1.0
SLOW = 3.0
"""Longer than a lease: whoever is stopped in such a fetch certainly loses it."""


class SlowAtFirst:
    """The first two visits take long, every later one is quick."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: Call) -> Reply:
        self.calls += 1
        return Reply(200, f"<title>{call.path}</title>".encode(), delay=SLOW if self.calls <= 2 else 0.0)


def test_late_verdicts_are_refused(shell: Shell) -> None:
    respond = SlowAtFirst()
    with LoopbackSite(respond) as site:
        wanted = [f"{site.url}page/{number}" for number in range(40)]
        options = ["--rate", "none", "--per-host", "2", "--allow-private", "--no-robots"]
        assert shell.run("enqueue", "zombies", *wanted, *options).code == 0
        words = ["worker", "--lease", str(LEASE), "--concurrency", "2"]
        sleeper = shell.start(*words)
        # Both its visits wait for the server, both lanes' slots are taken: apart from the keeper's
        # heartbeat, which is over in a millisecond, it has no business with the frontier's lock.
        wait_until(lambda: respond.calls == 2, "two slow fetches")
        stop_outside_the_lock(shell, sleeper.pid)
        other = shell.start(*words, "--drain")
        assert other.wait().code == 0
        job = shell.job("zombies")
        assert (job.state, job.counts.done, job.counts.stale) == (JobState.DONE, len(wanted), 0)
        sleeper.signal(signal.SIGCONT)
        wait_until(lambda: shell.job("zombies").counts.stale >= 2, "late verdicts")
        sleeper.signal(signal.SIGTERM)
        ended = sleeper.wait()
        assert ended.code == 0, ended.err
        assert "2 came too late" in ended.err
        job = shell.job("zombies")
        assert (job.state, job.counts.done, job.counts.items) == (JobState.DONE, len(wanted), len(wanted))
        assert Counter(item["url"] for item in shell.items("zombies")) == Counter(wanted)
        assert shell.check() == []


def stop_outside_the_lock(shell: Shell, pid: int) -> None:
    """SIGSTOP while it does not hold the frontier: a stopped holder would hold everybody."""
    import fcntl
    import os

    lock = os.open(f"{shell.db}-lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # now nobody else has it
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: _state(pid) == "T", "the stop")
    finally:
        os.close(lock)


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
