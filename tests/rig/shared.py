"""One server of each kind for all tests of a process: started on first use, ended with the run.

Each test has a prefix or a schema of its own. A test that kills a server, fills it or changes its settings
starts another one: see `redis_server`, `postgres_server` and `rabbitmq_server`.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache

from tests.rig import postgres_server, rabbitmq_server, redis_server
from tests.rig.postgres_server import PostgresServer
from tests.rig.rabbitmq_server import RabbitServer
from tests.rig.redis_server import RedisServer

_started = ExitStack()


@cache
def redis() -> RedisServer:
    return _started.enter_context(redis_server.redis_server())


@cache
def postgres() -> PostgresServer:
    return _started.enter_context(postgres_server.postgres_process())


@cache
def rabbitmq() -> RabbitServer:
    return _started.enter_context(rabbitmq_server.rabbitmq_server())


def close() -> None:
    """End the servers. The next call starts a new one."""
    _started.close()
    for kind in (redis, postgres, rabbitmq):
        kind.cache_clear()
