"""`shoal serve` in a process of its own, and requests to it exactly as a test wants them.

with Shell(tmp_path) as shell:
    service = Service(shell, "--workers", "1")
    job = service.post("/scrape", {"url": site.url}).json()["job_id"]
    assert service.ended(job)["status"] == "SUCCESS"
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.rig.command import PATIENCE, Shell, wait_until

ENDED = ("SUCCESS", "FAILURE", "REVOKED")


class Answer(Struct, frozen=True):
    status: int
    headers: dict[str, str]
    """Lower-case names."""
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Service:
    """A served API. It ends with its shell."""

    def __init__(self, shell: Shell, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.shell = shell
        self.running = shell.start("serve", "--port", "0", "--json", *arguments, env=env)
        wait_until(lambda: "\n" in self.running.out or self.running.over, "the address of the service")
        assert not self.running.over, self.running.err
        told = json.loads(self.running.out)
        self.url: str = told["url"]
        self.port = int(self.url.rpartition(":")[2])
        told_host = self.url.removeprefix("http://").rpartition(":")[0]
        self._host = "127.0.0.1" if told_host in ("0.0.0.0", "[::]") else told_host
        place = told["token_file"]
        self.token = (shell.root / Path(place)).read_text().strip() if place else ""
        wait_until(self._answers, "the service to answer")

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        raw: bytes | None = None,
        timeout: float = PATIENCE,
    ) -> Answer:
        """One request on a connection of its own. `raw` is a body that is not made from `body`."""
        sent = raw if raw is not None else json.dumps(body).encode() if body is not None else None
        kinds = {"Content-Type": "application/json"} if sent is not None else {}
        connection = HTTPConnection(self._host, self.port, timeout=timeout)
        try:
            connection.request(method, path, sent, {**kinds, **(headers or {})})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", path, body, named)

    def progress(self, job: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.get(f"/scrape/{job}/progress").json()
        return answer

    def ended(self, job: str) -> dict[str, Any]:
        """The job's progress when it has ended."""
        wait_until(lambda: self.progress(job)["status"] in ENDED, f"the end of {job}")
        return self.progress(job)

    def _answers(self) -> bool:
        assert not self.running.over, self.running.err
        try:
            return self.get("/healthz").status == 200
        except OSError:
            return False
