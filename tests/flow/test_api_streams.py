"""Event streams that last: who hangs up is noticed, and a service that ends does not wait for them."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.command import Shell, wait_until
from tests.rig.service import Service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Shell(tmp_path) as shell:
        yield Service(shell, "--workers", "0")


def listen(service: Service, job: str) -> socket.socket:
    """A stream whose first event has come. The job never ends: nobody works."""
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=30)
    connection.sendall(f"GET /scrape/{job}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    said = b""
    while b"event: progress" not in said:
        said += connection.recv(65536)
    assert b"text/event-stream" in said
    return connection


def streams(service: Service) -> int:
    found = re.search(r"^shoal_api_streams (\d+)", service.get("/metrics").body.decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_who_hangs_up_is_noticed(service: Service) -> None:
    job = service.post("/scrape", {"url": "http://example.com/"}).json()["job_id"]
    connections = [listen(service, job) for _ in range(5)]
    assert streams(service) == 5
    for connection in connections:
        connection.close()
    wait_until(lambda: streams(service) == 0, "the streams to end")
    assert "Traceback" not in service.running.err


def test_a_stream_ends_with_its_job(service: Service) -> None:
    job = service.post("/scrape", {"url": "http://example.com/"}).json()["job_id"]
    connection = listen(service, job)
    service.ask("DELETE", f"/scrape/{job}")
    said = b""
    while not said.endswith(b"0\r\n\r\n"):
        part = connection.recv(65536)
        assert part, said
        said += part
    assert b'"status":"REVOKED"' in said
    connection.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_service_ends_although_somebody_listens(service: Service, number: int, code: int) -> None:
    job = service.post("/scrape", {"url": "http://example.com/"}).json()["job_id"]
    connection = listen(service, job)
    service.running.signal(number)
    assert service.running.wait(20).code == code, service.running.err
    assert "graceful" not in service.running.err, "the stream ended by itself, nobody had to cancel it"
    connection.close()
