"""`shoal.Client` and `shoal.AsyncClient` against a real service that asks for a token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

import shoal
from shoal.client import ApiError
from shoal.demo.books import DemoSite, pages
from shoal.errors import UsageError
from tests.rig.command import Shell
from tests.rig.service import Service


@pytest.fixture(scope="module")
def site() -> Iterator[DemoSite]:
    with DemoSite() as served:
        yield served


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, site: DemoSite) -> Iterator[Service]:
    with Shell(tmp_path_factory.mktemp("client")) as shell:
        yield Service(shell, "--require-token", "--allow-endpoint", site.url.split("/")[2])


@pytest.fixture
def client(service: Service) -> Iterator[shoal.Client]:
    with shoal.Client(service.url, service.token) as made:
        yield made


def test_a_job_without_async(client: shoal.Client, site: DemoSite) -> None:
    job = client.scrape(site.url, rate="none", per_host=4, idempotency_key="mine")
    assert client.scrape(site.url, rate="none", per_host=4, idempotency_key="mine") == job
    assert client.wait(job, timeout=60, poll=0.05)["status"] == "SUCCESS"
    assert client.progress(job)["pages_done"] == len(pages())
    items = list(client.items(job))
    assert len({item["url"] for item in items}) == len(pages())
    assert [json.loads(line) for line in client.result(job, format="jsonl").splitlines()] == items
    assert client.cancel(job)["status"] == "SUCCESS"
    answer = client.batch([site.url + "about"], rate="none")
    assert answer["results"][0]["status"] == "success"
    business = client.business(site.url, rate="none", pages_to_scrape=["/about"])
    assert client.wait(business, timeout=60, poll=0.05)["pages_done"] == 1
    assert "scraping" in client.queue_status()["queues"]
    assert client.health()["parts"][0]["name"] == "frontier"


async def test_the_same_with_async(service: Service, site: DemoSite) -> None:
    async with shoal.AsyncClient(service.url, service.token) as client:
        jobs = await asyncio.gather(
            *(client.scrape(site.url + "about", scope="page", rate="none") for _ in range(5))
        )
        ended = await asyncio.gather(*(client.wait(job, timeout=60, poll=0.05) for job in jobs))
        assert [one["status"] for one in ended] == ["SUCCESS"] * 5
        assert [item["url"] async for item in client.items(jobs[0])] == [site.url + "about"]


async def test_what_is_refused_is_an_error_with_a_hint(service: Service) -> None:
    async with shoal.AsyncClient(service.url, service.token) as client:
        with pytest.raises(ApiError) as refused:
            await client.scrape("nonsense")
        assert (refused.value.status, bool(refused.value.hint)) == (422, True)
        with pytest.raises(ApiError) as missing:
            await client.progress("no/such job?")
        assert missing.value.status == 404
        slow = await client.scrape("http://192.0.2.1/", queue="nobody")
        with pytest.raises(TimeoutError):
            await client.wait(slow, timeout=0.1, poll=0.02)
        with pytest.raises(ApiError) as unfinished:
            await client.result(slow)
        assert unfinished.value.problem["progress"]["status"] == "PENDING"
        await client.cancel(slow)
    async with shoal.AsyncClient(service.url) as stranger:
        with pytest.raises(ApiError) as unknown:
            await stranger.health()
        assert unknown.value.status == 401


def test_a_service_that_is_not_there() -> None:
    with shoal.Client("http://127.0.0.1:9") as client, pytest.raises(ApiError) as away:
        client.health()
    assert away.value.status == 0
    assert "shoal serve" in away.value.hint
    with pytest.raises(UsageError):
        shoal.AsyncClient("127.0.0.1:8000")


async def test_it_works_where_a_loop_is_running_already(client: shoal.Client) -> None:
    assert "healthy" in client.health()


@pytest.mark.filterwarnings("error")
async def test_a_closed_client_says_so() -> None:
    client = shoal.Client("http://127.0.0.1:9")
    client.close()
    client.close()
    with pytest.raises(UsageError, match="closed"):
        client.health()
    with pytest.raises(UsageError, match="closed"):
        list(client.items("job"))
    other = shoal.AsyncClient("http://127.0.0.1:9")
    await other.close()
    await other.close()
    with pytest.raises(UsageError, match="closed"):
        await other.health()
