"""The server process: a socket, uvicorn, the messenger, the scheduler, and worker processes beside it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import uvicorn

from shoal.api.app import build, policy_of
from shoal.api.connection import Connection
from shoal.api.service import Service
from shoal.api.tokens import Tokens, owner_token
from shoal.app import Session, process_died
from shoal.engine.supervisor import Supervisor
from shoal.engine.worker import Worker
from shoal.errors import UsageError, ungrouped
from shoal.registry import DEFAULT_FRONTIER, in_process

CONNECTIONS = 2000
GRACE = 5


def bound(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError that says why there is none."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        raise UsageError(f"no address {host!r} to listen on", hint="127.0.0.1, or 0.0.0.0 for all") from None
    made = socket.socket(family, kind, proto)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
        made.listen(2048)
    except OSError as error:
        made.close()
        busy = error.errno == errno.EADDRINUSE
        why = "it is in use" if busy else str(error.strerror)
        raise UsageError(
            f"cannot listen on {host}:{port}: {why}",
            hint="another `shoal serve` may run; --port takes another" if busy else "see --host and --port",
        ) from None
    made.setblocking(False)
    return made


def is_loopback(made: socket.socket) -> bool:
    """By the address that is bound, not by the name that was given."""
    return ipaddress.ip_address(made.getsockname()[0].partition("%")[0]).is_loopback


def url_of(made: socket.socket) -> str:
    host, port = made.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """Serves until stopped. `stop` ends it gently, `stop` again at once."""

    def __init__(
        self,
        session: Session,
        made: socket.socket,
        *,
        workers: int,
        queues: Sequence[str],
        tell: Callable[[str], None],
        hear: Callable[[str], None] | None = None,
        log: Callable[[str], None] | None = None,
        staff: Sequence[str] = (),
    ) -> None:
        """`staff` are queues from which workers take that whoever started us starts beside us. `hear` gets
        the lines that our workers log."""
        settings = session.settings
        tokens = Tokens(owner_token(settings.token_file), settings.tokens)
        if not tokens and not policy_of(settings, loopback=is_loopback(made)).open:
            raise UsageError(
                f"no token, and {url_of(made)} needs one", hint="name a --token-file, or set `tokens`"
            )
        self._session = session
        self._socket = made
        self._tell = tell
        self.service = Service(session, tell=tell, staff=tuple(queues) if workers else tuple(staff) or None)
        config = uvicorn.Config(
            build(self.service, tokens, loopback=is_loopback(made), address=made.getsockname()[0], log=log),
            http=Connection,  # h11 bounds the head of a request; httptools does not
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # who sent it is whom we see
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=GRACE,
        )
        self._server = _Uvicorn(config)
        self._supervisor: Supervisor | None = None
        self._worker: Worker | None = None
        if workers and in_process(settings.frontier):
            # Nobody else can see it: the one worker is here.
            self._worker = session.worker(queues=queues, drain=False)
        elif workers:
            command = [
                *(sys.executable, "-m", "shoal", "worker", "--quiet", "--queues", ",".join(queues)),
                *("--concurrency", str(settings.concurrency), "--lease", str(settings.lease)),
            ]
            # By the environment: an address may hold a password, and everybody sees command lines.
            env = {"SHOAL_FRONTIER": settings.frontier or DEFAULT_FRONTIER, "SHOAL_APP": settings.app}
            env |= settings.log_variables
            self._supervisor = Supervisor(
                command,
                workers,
                tell=tell,
                on_line=hear,
                env=env,
                lasting=True,
                on_death=partial(process_died, session.frontier),
            )

    def stop(self) -> None:
        self.service.closing.set()
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True
        if self._supervisor is not None:
            self._supervisor.stop()
        if self._worker is not None:
            self._worker.stop()

    async def run(self) -> None:
        """Raises what ends it before it was stopped: a worker that cannot be kept alive."""
        with ungrouped():
            async with asyncio.TaskGroup() as group:
                beside = [
                    group.create_task(self.service.messenger.run()),
                    group.create_task(self.service.scheduler.run()),
                ]
                parts = [group.create_task(self._server.serve([self._socket]))]
                if self._supervisor is not None:
                    parts.append(group.create_task(self._supervisor.run()))
                if self._worker is not None:
                    parts.append(group.create_task(self._worker.run()))
                await asyncio.wait(parts)
                for task in beside:
                    task.cancel()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the command, which stops the workers too."""
        yield
