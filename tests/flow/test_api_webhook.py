"""`job.finished`: signed, retried, once for each job, and never further than the guard allows."""

from __future__ import annotations

import hmac
import json
import signal
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from shoal.demo.site import Call, LoopbackSite, Reply
from shoal.export.webhook import signature
from tests.rig.command import Shell, wait_until
from tests.rig.service import Service

SECRET = "a-shared-secret"
WAITING = "waiting"


class Receiver:
    """Answers what it is told to, remembers what came."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.statuses: list[int] = []
        self.hold = threading.Event()
        self.hold.set()

    def __call__(self, call: Call) -> Reply:
        if call.method != "POST":
            return Reply(200, b"<title>a page</title>")
        self.hold.wait(30)
        self.calls.append(call)
        status = self.statuses.pop(0) if self.statuses else 200
        headers = (("Location", "/page"),) if status == 302 else ()
        return Reply(status, b"thanks", headers=headers)


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def site(receiver: Receiver) -> Iterator[LoopbackSite]:
    with LoopbackSite(receiver) as served:
        yield served


def serve(shell: Shell, site: LoopbackSite, *more: str) -> Service:
    return Service(shell, "--workers", "1", "--allow-endpoint", site.url.split("/")[2], *more)


@pytest.fixture
def service(tmp_path: Path, site: LoopbackSite) -> Iterator[Service]:
    with Shell(tmp_path) as shell:
        yield serve(shell, site)


def asked(site: LoopbackSite) -> dict[str, object]:
    hook = {"url": site.url + "hook", "secret": SECRET}
    return {"url": site.url + "page", "scope": "page", "rate": "none", "webhook": hook}


def delivery(service: Service, job: str) -> tuple[str, int]:
    told = service.get(f"/jobs/{job}").json()["webhook_delivery"]
    return told["state"], told["attempts"]


def over(service: Service, job: str) -> tuple[str, int]:
    wait_until(lambda: delivery(service, job)[0] != WAITING, "the end of the delivery")
    return delivery(service, job)


def test_one_signed_message(service: Service, site: LoopbackSite, receiver: Receiver) -> None:
    job = service.post("/scrape", asked(site)).json()["job_id"]
    assert over(service, job) == ("delivered", 1)
    (call,) = receiver.calls
    body = json.loads(call.body)
    assert (body["event"], body["job_id"], body["status"]) == ("job.finished", job, "SUCCESS")
    assert body["progress"]["pages_done"] == 1
    stamp = call.headers["x-shoal-timestamp"]
    expected = hmac.new(SECRET.encode(), stamp.encode() + b"." + call.body, sha256).hexdigest()
    assert call.headers["x-shoal-signature"] == f"sha256={expected}"
    assert call.headers["x-shoal-event"] == "job.finished"
    assert call.headers["x-shoal-delivery"] == job
    assert call.headers["content-type"] == "application/json"


def test_a_cancelled_job_has_ended_too(service: Service, site: LoopbackSite, receiver: Receiver) -> None:
    job = service.post("/scrape", asked(site) | {"url": site.url + "slow/60"}).json()["job_id"]
    service.ask("DELETE", f"/scrape/{job}")
    assert over(service, job) == ("delivered", 1)
    assert json.loads(receiver.calls[0].body)["status"] == "REVOKED"


def test_it_is_tried_again(service: Service, site: LoopbackSite, receiver: Receiver) -> None:
    receiver.statuses = [500, 302]
    job = service.post("/scrape", asked(site)).json()["job_id"]
    assert over(service, job) == ("delivered", 3)
    assert len({call.headers["x-shoal-delivery"] for call in receiver.calls}) == 1
    assert {call.path for call in receiver.calls} == {"/hook"}, "a redirect is not followed"


@pytest.mark.slow
def test_a_crash_loses_no_message_and_another_process_sends_it(
    tmp_path: Path, site: LoopbackSite, receiver: Receiver
) -> None:
    with Shell(tmp_path) as shell:
        receiver.hold.clear()
        first = serve(shell, site)
        job = first.post("/scrape", asked(site)).json()["job_id"]
        wait_until(lambda: delivery(first, job)[1] == 1, "the first attempt")
        first.running.kill()
        receiver.hold.set()
        second = serve(shell, site)
        assert over(second, job) == ("delivered", 2)
        # The first had arrived when its sender died: the id tells the receiver that it is the same.
        assert {call.headers["x-shoal-delivery"] for call in receiver.calls} == {job}
        assert len(receiver.calls) <= 2


@pytest.mark.slow
def test_two_services_send_it_once(tmp_path: Path, site: LoopbackSite, receiver: Receiver) -> None:
    with Shell(tmp_path) as shell:
        services = [serve(shell, site), serve(shell, site)]
        jobs = [services[n % 2].post("/scrape", asked(site)).json()["job_id"] for n in range(6)]
        for job in jobs:
            assert over(services[0], job) == ("delivered", 1)
        for service in services:
            service.running.signal(signal.SIGTERM)
            assert service.running.wait().code == 0
        assert sorted(json.loads(call.body)["job_id"] for call in receiver.calls) == sorted(jobs)


@pytest.mark.slow
def test_a_private_receiver_is_not_reached(tmp_path: Path, receiver: Receiver) -> None:
    """The page may be fetched, but the message would go to an address that nobody allowed."""
    with LoopbackSite(receiver) as open_site, LoopbackSite(receiver) as inner, Shell(tmp_path) as shell:
        service = serve(shell, open_site)
        hook = {"url": inner.url + "hook", "secret": SECRET}
        job = service.post("/scrape", asked(open_site) | {"webhook": hook}).json()["job_id"]
        assert service.ended(job)["status"] == "SUCCESS"
        # Counted when it begins: with the second the first is over.
        wait_until(lambda: delivery(service, job)[1] >= 2, "two attempts")
        assert inner.log() == []
        assert receiver.calls == []


def test_the_signature_is_the_documented_one() -> None:
    assert signature("secret", "1700000000", b"{}") == (
        "sha256=" + hmac.new(b"secret", b"1700000000.{}", sha256).hexdigest()
    )


def test_a_job_of_a_schedule_is_told_as_well_and_soon(
    service: Service, site: LoopbackSite, receiver: Receiver
) -> None:
    service.post("/schedules", asked(site) | {"name": "tick", "every": "1s"})
    # Sooner than a look at all jobs would find it.
    wait_until(lambda: receiver.calls, "the message", timeout=40)
    assert json.loads(receiver.calls[0].body)["job_id"].startswith("tick-2")
