"""A private RabbitMQ for tests and measurements: own ports, own folder, gone with its owner.

    with rabbitmq_server() as server:
        dispatch = RabbitDispatch(f"{server.url}?prefix=mine.")

The system's own broker is never touched: node name, cookie and even the port mapper of Erlang
(epmd) are its own. A start takes 5 to 15 seconds, so share one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.rig.ports import free_ports

# Debian keeps the programs here; its wrappers in PATH insist on the system's user and cookie.
PROGRAMS = Path("/usr/lib/rabbitmq/bin")
START_LIMIT = 90.0
_PR_SET_PDEATHSIG = 1


def available() -> bool:
    return _program("rabbitmq-server") is not None and shutil.which("epmd") is not None


def _program(name: str) -> str | None:
    ours = PROGRAMS / name
    return str(ours) if ours.exists() else shutil.which(name)


class RabbitServer:
    """A broker that can be killed and started again, on the same port and with the same files."""

    def __init__(self, folder: Path, settings: Sequence[str] = ()) -> None:
        """`settings` are lines of rabbitmq.conf."""
        self._folder = folder
        self._mapper: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder / "output"
        self.port, self._peer_port, self._mapper_port = free_ports(3)
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbit.conf").write_text("\n".join(["loopback_users = none", *settings, ""]))

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def _env(self) -> dict[str, str]:
        folder = self._folder
        return {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("RABBITMQ_", "ERL_"))
            },
            "HOME": str(folder),
            "RABBITMQ_NODENAME": f"shoal{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._peer_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbit.conf"),
            # One thread that does not spin: tests share their machine.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
            # The shell script becomes the broker instead of waiting for it: our signals arrive.
            "RUNNING_UNDER_SYSTEMD": "1",
            "ERL_EPMD_PORT": str(self._mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }

    def start(self) -> None:
        program, mapper = _program("rabbitmq-server"), shutil.which("epmd")
        if program is None or mapper is None:
            raise FileNotFoundError("rabbitmq-server is not installed")
        if self._mapper is None:
            # Started here, or the broker starts one that outlives everybody.
            words = [mapper, "-port", str(self._mapper_port), "-address", "127.0.0.1"]
            self._mapper = _popen(words, self._env, self._log)
        self._process = _popen([program], self._env, self._log)
        end = time.monotonic() + START_LIMIT
        while not _answers(self.port):
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(
                    f"RabbitMQ does not start: {self._log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL: what it confirmed must be in its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It stays connected and says nothing more, until `thaw`."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def ctl(self, *words: str) -> str:
        """What `rabbitmqctl` answers. It starts an Erlang of its own: two seconds each time."""
        program = _program("rabbitmqctl")
        assert program is not None
        done = subprocess.run(
            [program, "--quiet", *words], env=self._env, capture_output=True, check=False, timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"rabbitmqctl {' '.join(words)}: {done.stderr.decode(errors='replace')}")
        return done.stdout.decode(errors="replace")

    def close(self) -> None:
        self.kill()
        if self._mapper is not None:
            self._mapper.kill()
            self._mapper.wait()
            self._mapper = None


@contextmanager
def rabbitmq_server(*settings: str) -> Iterator[RabbitServer]:
    """Start a broker, end it. `settings` are lines of rabbitmq.conf."""
    with TemporaryDirectory(prefix="shoal-rabbit-", ignore_cleanup_errors=True) as folder:
        server = RabbitServer(Path(folder), settings)
        try:
            server.start()
            yield server
        finally:
            server.close()


def _popen(words: Sequence[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no locks
        )


def _answers(port: int) -> bool:
    """The port opens before the broker is ready: only a greeting counts."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
        connection.sendall(b"AMQP\x00\x00\x09\x01")
        return connection.recv(1) == b"\x01"
    return False


def _die_with_parent() -> None:
    """Linux: a killed test run leaves no broker behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
