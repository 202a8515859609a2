"""What Ctrl-C does to a command that is asked to end, and asked again."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from shoal.cli.common import Signals


def test_the_third_interrupt_does_not_ask() -> None:
    asked: list[int] = []

    async def command() -> None:
        with Signals(lambda: asked.append(1)) as signals:
            for number in (1, 2):
                os.kill(os.getpid(), signal.SIGINT)
                while len(asked) < number:
                    await asyncio.sleep(0)
            assert signals.code == 130
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(command())
    assert len(asked) == 2


def test_a_supervisor_may_ask_often() -> None:
    asked: list[int] = []

    async def command() -> int:
        with Signals(lambda: asked.append(1)) as signals:
            for number in range(1, 6):
                os.kill(os.getpid(), signal.SIGTERM)
                while len(asked) < number:
                    await asyncio.sleep(0)
            return signals.code

    assert asyncio.run(command()) == 0
