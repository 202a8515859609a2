"""The supervisor of worker processes: what is started again, and what is not."""

from __future__ import annotations

import sys
from itertools import count

import pytest

from shoal.engine import supervisor
from shoal.engine.supervisor import Supervisor
from shoal.errors import ServerAway, ShoalError


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "backoff", lambda *_, **__: 0.0)
    monkeypatch.setattr(supervisor, "MAX_CRASHES", 2)


async def ended_by(code: int, *, lasting: bool) -> tuple[ShoalError, list[str]]:
    said: list[str] = []
    ending = Supervisor([sys.executable, "-c", f"exit({code})"], 1, tell=said.append, lasting=lasting)
    with pytest.raises(ShoalError) as caught:
        await ending.run()
    return caught.value, said


async def test_a_worker_that_found_no_server_ends_a_crawl() -> None:
    error, said = await ended_by(4, lasting=False)
    assert (type(error), error.exit_code, said) == (ServerAway, 4, [])
    assert error.hint


async def test_one_that_is_kept_alive_is_tried_again_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hours = count(0.0, 3600.0)
    monkeypatch.setattr("shoal.engine.supervisor.time.monotonic", lambda: next(hours))
    error, said = await ended_by(4, lasting=True)
    assert (type(error), error.exit_code, len(said)) == (ServerAway, 4, 2), "waiting long is no work"


async def test_a_worker_that_crashes_again_and_again_is_given_up() -> None:
    error, said = await ended_by(1, lasting=False)
    assert (type(error), error.exit_code, len(said)) == (ShoalError, 2, 2)
