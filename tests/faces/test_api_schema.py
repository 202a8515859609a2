"""Every operation of the OpenAPI document, with generated requests: no 5xx, nothing undocumented."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.rig.command import Shell
from tests.rig.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Shell(tmp_path_factory.mktemp("schema")) as shell:
        yield Service(shell, "--workers", "0", "--quiet")


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
GIVEN = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)


@pytest.mark.slow
def test_every_operation_answers_as_documented(service: Service) -> None:
    # Something to find: a job, a lane.
    service.post("/scrape", {"url": "http://example.com/"})
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    assert len(operations) > 25
    for operation in operations:
        _try(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
        with suppress(Unsatisfiable):  # nothing can be wrong about an operation without parameters
            _try(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))


def _try(cases: SearchStrategy[schemathesis.Case[Any]]) -> None:
    @GIVEN
    @given(case=cases)
    def answers_as_documented(case: schemathesis.Case[Any]) -> None:
        if case.path == "/api/crawl/batch" and isinstance(case.body, dict) and case.body.get("urls"):
            # A batch waits for the internet; it is tested where there is a site. Here it need not wait.
            case.body["timeout"] = 0.2
        case.call_and_validate(checks=CHECKS, timeout=30)

    answers_as_documented()
