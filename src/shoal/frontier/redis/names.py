"""The numbers by which the scripts name jobs and queues. They never change, so each is looked up once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from shoal.errors import NoSuchJob
from shoal.frontier.redis import codec
from shoal.frontier.redis.client import Client


class Names:
    """Jobs by name and by number, and the queues of streams. Unknown ones are looked up on the server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._numbers: dict[str, int] = {}
        self._jobs: dict[int, str] = {}
        self._queues: dict[int, str] = {}

    async def numbers(self, names: Collection[str], *, must: bool = True) -> Mapping[str, int]:
        """Return the numbers of all known jobs, these among them. With `must`, raises NoSuchJob for a job
        that does not exist."""
        missing = [name for name in names if name not in self._numbers]
        if missing:
            client = self._client
            numbers = await client.command("HMGET", client.key("jobids"), *missing)
            for name, number in zip(missing, numbers, strict=True):
                if number is not None:
                    self.learn(name, int(number))
                elif must:
                    raise NoSuchJob(name)
        return self._numbers

    async def number(self, job: str) -> int:
        """Return the number of a job. Raises NoSuchJob."""
        return (await self.numbers({job}))[job]

    async def jobs(self, numbers: Iterable[int]) -> Mapping[int, str]:
        """Return the names of all known jobs, these among them."""
        missing = [number for number in numbers if number not in self._jobs]
        if missing:
            raws = await self._client.command("HMGET", self._client.key("jobs"), *missing)
            for number, raw in zip(missing, raws, strict=True):
                self.learn(codec.job_name(raw), number)
        return self._jobs

    async def queues(self, streams: Iterable[int]) -> Mapping[int, str]:
        """Return the queues of all known streams, these among them."""
        missing = [number for number in streams if number not in self._queues]
        if missing:
            raws = await self._client.command("HMGET", self._client.key("streams"), *missing)
            self._queues.update(
                (number, codec.queue_name(raw)) for number, raw in zip(missing, raws, strict=True)
            )
        return self._queues

    def learn(self, job: str, number: int) -> None:
        self._numbers[job] = number
        self._jobs[number] = job
