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


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises UsageError that says why there is none."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        raise UsageError(
            f"cannot listen on {host!r}: there is no such address",
            hint="use 127.0.0.1, or 0.0.0.0 for all addresses of this machine",
        ) from None
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        busy = error.errno == errno.EADDRINUSE
        why = "the port is in use" if busy else str(error.strerror)
        raise UsageError(
            f"cannot listen on {host}:{port}: {why}",
            hint="is another `shoal serve` running? choose another with --port"
            if busy
            else "choose another address with --host and --port",
        ) from None
    sock.setblocking(False)
    return sock


def is_loopback(sock: socket.socket) -> bool:
    """Judges by the bound address, not by the given name."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """Serves until stopped. The first `stop` lets requests finish, the second ends at once."""

    def __init__(
        self,
        session: Session,
        sock: socket.socket,
        *,
        workers: int,
        queues: Sequence[str],
        tell: Callable[[str], None],
        hear: Callable[[str], None] | None = None,
        log: Callable[[str], None] | None = None,
        staff: Sequence[str] = (),
    ) -> None:
        """`staff` are the queues of workers that the parent process starts beside this one. `hear` receives
        the lines that our workers log."""
        settings = session.settings
        tokens = Tokens(owner_token(settings.token_file), settings.tokens)
        if not tokens and not policy_of(settings, loopback=is_loopback(sock)).open:
            raise UsageError(
                f"{url_of(sock)} needs a token, and none is configured",
                hint="name a file with --token-file, or set `tokens`",
            )
        self._session = session
        self._socket = sock
        self._tell = tell
        self.service = Service(session, tell=tell, staff=tuple(queues) if workers else tuple(staff) or None)
        config = uvicorn.Config(
            build(self.service, tokens, loopback=is_loopback(sock), address=sock.getsockname()[0], log=log),
            http=Connection,  # h11 bounds the head of a request; httptools does not
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the client is the peer of the connection, whatever headers say
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=GRACE,
        )
        self._server = _Uvicorn(config)
        self._supervisor: Supervisor | None = None
        self._worker: Worker | None = None
        if workers and in_process(settings.frontier):
            # Other processes cannot see this frontier: the one worker runs here.
            self._worker = session.worker(queues=queues, drain=False)
        elif workers:
            command = [
                *(sys.executable, "-m", "shoal", "worker", "--quiet", "--queues", ",".join(queues)),
                *("--concurrency", str(settings.concurrency), "--lease", str(settings.lease)),
            ]
            # Through the environment: an address may have a password, and all users can see command lines.
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
        """Runs until stopped. Raises the error of a worker that cannot be kept alive."""
        with ungrouped():
            async with asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(self.service.messenger.run()),
                    group.create_task(self.service.scheduler.run()),
                ]
                parts = [group.create_task(self._server.serve([self._socket]))]
                if self._supervisor is not None:
                    parts.append(group.create_task(self._supervisor.run()))
                if self._worker is not None:
                    parts.append(group.create_task(self._worker.run()))
                await asyncio.wait(parts)
                for task in helpers:
                    task.cancel()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the command, which stops the workers too."""
        yield
