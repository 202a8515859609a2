"""How the Celery app connects to its broker. Other apps of the process have kombu as it is."""

from __future__ import annotations

from typing import Any

import kombu
from celery.app.amqp import AMQP


class Connection(kombu.Connection):  # type: ignore[misc]
    """kombu's, with a Redis transport that survives what it cannot read.

    Chosen here and not by `broker_transport`: so every scheme, several brokers in turn, and the address
    in the log stay what they are.
    """

    def get_transport_cls(self) -> Any:
        found = super().get_transport_cls()
        if found.__module__ != "kombu.transport.redis":
            return found
        from shoal.celery.redis_transport import TRANSPORTS

        return TRANSPORTS.get(found, found)


class Amqp(AMQP):  # type: ignore[misc]
    """What the app makes its connections with."""

    Connection = Connection
