"""What every test may rely on."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import settings

from tests.rig import postgres_server, rabbitmq_server, redis_server, shared
from tests.rig.postgres_server import PostgresServer
from tests.rig.rabbitmq_server import RabbitServer
from tests.rig.redis_server import RedisServer

# A shell that starts a job in the background ignores SIGINT for it, and children inherit that.
# Tests press Ctrl-C: give it back its meaning, whoever started us.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` looks at a few random examples, the same each time; `make test-all` at many.
# No deadlines: they measure the machine.
settings.register_profile("few", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("whole", max_examples=250, deadline=None)
settings.load_profile("whole" if os.environ.get("SHOAL_HYPOTHESIS") else "few")

RUN_FOLDER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """All processes of a run share a folder, so that PostgreSQL's files are made once."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None:
        folder = Path(tempfile.mkdtemp(prefix="shoal-tests-"))
        config.stash[RUN_FOLDER] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    else:
        folder = Path(worker["run_folder"])
    postgres_server.copies_from(folder / "postgres")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called by xdist for each process that it starts."""
    node.workerinput["run_folder"] = str(node.config.stash[RUN_FOLDER])


@pytest.fixture(scope="session", autouse=True)
def servers_end() -> Iterator[None]:
    """The shared servers end with the session."""
    yield
    shared.close()


# -- servers that many tests share ----------------------------------------------------------------


@pytest.fixture
def shared_redis() -> RedisServer:
    if not redis_server.available():
        pytest.skip("redis-server is not installed")
    return shared.redis()


@pytest.fixture
def shared_postgres() -> PostgresServer:
    if postgres_server.binaries() is None:
        pytest.skip("PostgreSQL's server programs are not installed")
    return shared.postgres()


@pytest.fixture
def shared_rabbit() -> RabbitServer:
    if not rabbitmq_server.available():
        pytest.skip("rabbitmq-server is not installed")
    return shared.rabbitmq()


@pytest.fixture
def redis_url(shared_redis: RedisServer) -> str:
    """A frontier of one test alone."""
    return f"{shared_redis.url}?prefix={uuid4().hex}"


@pytest.fixture
def postgres_url(shared_postgres: PostgresServer) -> str:
    """A frontier of one test alone."""
    return f"{shared_postgres.address}?schema=t{uuid4().hex}"


@pytest.fixture
def rabbit_url(shared_rabbit: RabbitServer) -> str:
    """Queues of one test alone."""
    return f"{shared_rabbit.url}?prefix={uuid4().hex}."
