"""The connection to a Redis server: calls in order, the scripts, readable errors, and wake-ups.

`Client` sends calls over one connection and returns their replies in order. `Listener` has a second
connection, on which the scripts publish that work is due earlier than a waiting worker was told.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit

import msgspec
import redis.asyncio as aredis
from redis import exceptions as errors

from shoal import clock as clocks
from shoal.addresses import listens, shown
from shoal.errors import FrontierError, FrontierFull, FrontierUnreachable, UsageError
from shoal.frontier.rules import microseconds

T = TypeVar("T")

LAYOUT = 1
"""The version of the keys; see the map in `prelude.lua`. Any other version is refused."""
LEASES_PER_CALL = 50
"""So that no call delays the others for much longer than a millisecond."""
WINDOW = 8
"""Calls that may be in flight at once, so that the server never waits for the client to encode."""
POLL = 5.0
"""Seconds after which a waiting worker asks by itself: a message may be lost with its connection."""
IDLE = 15.0
"""Seconds without a call after which a connection is tested before it is used."""

_HINT = "redis://:password@host:6379/0?prefix=name"
_WRONG_PORT = {
    False: "check the port: another service may be listening there; a server with TLS is rediss://",
    True: "a server without TLS is redis://; or check the port: another service may be listening there",
}
_LUA = files("shoal.frontier.redis")
_PRELUDE = _LUA.joinpath("prelude.lua").read_bytes()
_SCRIPTS = [_PRELUDE + _LUA.joinpath(name).read_bytes() for name in ("hot.lua", "catalog.lua")]
_SHA_OF = {
    verb: hashlib.sha1(script, usedforsecurity=False).hexdigest().encode()
    for script in _SCRIPTS
    for verb in re.findall(r"^function verbs\.(\w+)", script.decode(), re.MULTILINE)
}
"""The hash of the script that has each verb."""
_BROKEN = (errors.RedisError, OSError, TimeoutError)
"""The errors of a broken connection."""

_pack = msgspec.msgpack.Encoder().encode


class Client:
    """One prefix on a Redis server. It connects at the first call, and again after a cut."""

    def __init__(self, url: str, clock: clocks.Clock | None) -> None:
        """Raises UsageError if the address is invalid. Time is the server's; only tests give a `clock`."""
        try:
            parts = urlsplit(url)
            options = parse_qs(parts.query)
            name = options.pop("prefix", ["default"])[0]
            query = "&".join(f"{key}={value}" for key, values in options.items() for value in values)
            settings: dict[str, Any] = dict(
                aredis.connection.parse_url(urlunsplit(parts._replace(query=query)))
            )
        except ValueError:
            raise UsageError("the Redis address is invalid", hint=f"write {_HINT}") from None
        self.shown = shown(url)
        """The address without its password."""
        if not re.fullmatch(r"/?[0-9]*/?", parts.path):
            raise UsageError(f"{self.shown}: the database must be a number", hint=f"write {_HINT}")
        if not name or set(name) & set("{}"):
            raise UsageError(f"bad prefix {name!r}", hint="use letters, digits and dashes")
        kind: Any = settings.pop("connection_class", aredis.Connection)
        self._endpoint = str(settings.get("host", "localhost")), int(settings.get("port", 6379))
        settings.setdefault("socket_connect_timeout", 5.0)
        settings.setdefault("socket_timeout", 30.0)
        settings.setdefault("socket_keepalive", True)  # the listener may read for hours
        settings |= {"protocol": 2, "decode_responses": False}
        try:
            kind(**settings)
        except TypeError:
            raise UsageError(f"{self.shown} has an unknown option", hint=f"write {_HINT}") from None
        self._prefix = f"{{shoal:{name}}}:".encode()
        self._clock = clock
        self._tls = parts.scheme == "rediss"
        self._mute = False
        """Whether the last connection failed before the server sent a reply."""
        self._has_password = bool(settings.get("password"))
        """Whether the address has a password. Without one, the server may ask for it."""
        self._connect: Callable[[], Any] = lambda: kind(**settings)
        self._connection: Any = None
        self._used = 0.0
        self._lock = asyncio.Lock()
        self._in_flight: set[asyncio.Task[Any]] = set()
        self.listener = Listener(self._connect, self.key("wake"))

    async def greet(self) -> int:
        """Mark an empty server as a frontier. Returns how many jobs have ended there. Raises a FrontierError
        that names the problem with the server."""
        try:
            layout, version = await self.call("open", [LAYOUT])
        except FrontierUnreachable as error:
            if self._mute and await listens(*self._endpoint):
                how = " over TLS" if self._tls else ""
                raise FrontierUnreachable(
                    f"{self.shown} accepts the connection, but does not answer as Redis does{how}",
                    hint=_WRONG_PORT[self._tls],
                    server=error.server,
                ) from None
            raise
        if layout != LAYOUT:
            raise FrontierError(
                f"{self.shown} has key layout {layout}, but this release only knows layout {LAYOUT}",
                hint="upgrade shoal, or choose another ?prefix=name",
            )
        return int(version)

    async def close(self) -> None:
        await self.listener.close()
        if self._in_flight:
            await asyncio.gather(*self._in_flight, return_exceptions=True)
        await self._drop(gently=True)
        await asyncio.sleep(0)  # transports that were dropped before are closed in the next pass of the loop

    def key(self, name: str, number: int | None = None) -> bytes:
        """Return the full name of a key of the map in `prelude.lua`."""
        tail = "" if number is None else f":{number}"
        return self._prefix + f"{name}{tail}".encode()

    def pack(self, verb: str, values: Any, *more: bytes) -> bytes:
        """Encode the call of a verb, for `ask`."""
        clock = b"" if self._clock is None else b"%d" % microseconds(self._clock())
        words = (_SHA_OF[verb], b"1", self._prefix, verb.encode(), clock, _pack(values))
        return _command(b"EVALSHA", *words, *more)

    async def call(self, verb: str, values: Any, *more: bytes) -> Any:
        """Call one verb and return its reply. Any: each verb has its own type of reply."""
        [reply] = await self.ask([self.pack(verb, values, *more)])
        return reply

    async def walk(self, verb: str, values: list[Any]) -> None:
        """Call a verb repeatedly until it has gone through all lanes of a job, some in each call."""
        cursor = "0"
        while (cursor := (await self.call(verb, [*values, cursor])).decode()) != "0":
            pass

    async def command(self, *words: bytes | str | int) -> Any:
        """Send a plain command and return its reply. Any: each command has its own type of reply."""
        [reply] = await self.ask([_command(*map(_word, words))])
        return reply

    async def ask(self, commands: Iterable[bytes]) -> list[Any]:
        """Send commands and return their replies in order. Continues even if the caller is cancelled."""
        task = asyncio.create_task(self._exchange(commands))
        self._in_flight.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            task.exception()  # marks the error as seen: the caller may be gone

    async def _exchange(self, commands: Iterable[bytes]) -> list[Any]:
        async with self._lock:
            try:
                connection = await self._connected()
                sent: list[bytes] = []
                replies: list[Any] = []
                for command in commands:
                    if len(sent) - len(replies) >= WINDOW:
                        replies.append(await _reply(connection))
                    await connection.send_packed_command(command, check_health=False)
                    sent.append(command)
                while len(replies) < len(sent):
                    replies.append(await _reply(connection))
                lost = [i for i, reply in enumerate(replies) if isinstance(reply, errors.NoScriptError)]
                if lost:
                    # The scripts were flushed, or a replica took over: these calls did not run.
                    await _load(connection)
                    for place in lost:
                        await connection.send_packed_command(sent[place], check_health=False)
                        replies[place] = await _reply(connection)
            except BaseException as error:
                await self._drop()
                if isinstance(error, _BROKEN):
                    self._translate(error)
                raise
            self._used = asyncio.get_running_loop().time()
        for reply in replies:
            if isinstance(reply, errors.ResponseError):
                self._translate(reply)
        return replies

    async def _connected(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._connection is not None and loop.time() - self._used > IDLE:
            try:
                await self._connection.send_command("PING", check_health=False)
                await self._connection.read_response()
            except _BROKEN:
                await self._drop()
        if self._connection is None:
            connection = self._connection = self._connect()
            await connection.connect()
            if not self._has_password:
                # A server that requires a password closes the connection at a long script, without an error.
                with suppress(errors.NoPermissionError):
                    await connection.send_command("PING", check_health=False)
                    await connection.read_response()
            await _load(connection)
        return self._connection

    async def _drop(self, *, gently: bool = False) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(errors.RedisError):
                await connection.disconnect(nowait=not gently)

    def _translate(self, error: BaseException) -> NoReturn:
        """Raise an error of Redis as a sentence with a way out. The text of a connection error may contain
        the address with its password, so those errors are described by their type."""
        text = str(error)
        if not self._has_password and isinstance(error, errors.AuthenticationError):
            raise FrontierError(
                f"Redis at {self.shown} needs a password",
                hint="write redis://:password@host:port/0, or redis:// and set REDIS_PASSWORD",
            ) from None
        if isinstance(error, errors.AuthenticationError | errors.NoPermissionError) or "NOAUTH" in text:
            raise FrontierError(
                f"{self.shown} refuses the user or password",
                hint="write redis://user:password@host:port/0; the user needs scripts and its prefix's keys",
            ) from None
        if isinstance(error, errors.OutOfMemoryError) or text.startswith("OOM"):
            raise FrontierFull(
                f"{self.shown} has no memory left",
                hint="raise maxmemory, or export and remove finished jobs: nothing is lost",
            ) from None
        if "MISCONF" in text:
            raise FrontierFull(
                f"{self.shown} cannot write to its disk", hint="free some space on the server's disk"
            ) from None
        if isinstance(error, errors.ReadOnlyError):
            raise FrontierError(
                f"{self.shown} is a replica", hint="give the address of the primary"
            ) from None
        if isinstance(error, errors.BusyLoadingError):
            raise FrontierUnreachable(
                f"{self.shown} is still loading its data",
                hint="wait until the server has started",
                server=self.shown,
            ) from None
        if "CERTIFICATE_VERIFY_FAILED" in text:
            raise FrontierError(
                f"the certificate of {self.shown} is not trusted",
                hint="name its certificate authority: rediss://host:port/0?ssl_ca_certs=/path/to/ca.pem",
            ) from None
        if isinstance(error, errors.InvalidResponse):
            raise FrontierError(
                f"{self.shown} does not answer as Redis does", hint=_WRONG_PORT[self._tls]
            ) from None
        if isinstance(error, errors.ConnectionError | errors.TimeoutError | OSError | TimeoutError):
            self._mute = True
            raise FrontierUnreachable(
                f"{self.shown} does not answer",
                hint="check that the server runs and that the address is right",
                server=self.shown,
            ) from None
        raise FrontierError(f"{self.shown}: {text}", hint="run `shoal doctor` for details") from error


class Listener:
    """Sets an event at each message of a channel, on a connection of its own."""

    def __init__(self, connect: Callable[[], Any], channel: bytes) -> None:
        self._connect = connect
        self._channel = channel
        self._bell = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._closing = False

    def start(self) -> None:
        """Start to listen, unless it listens already."""
        if self._task is None:
            self._task = asyncio.create_task(self._listen())

    @property
    def bell(self) -> asyncio.Event:
        """An event that the next message sets. Get it before you ask for work, and no message is missed."""
        return self._bell

    @property
    def poll(self) -> float:
        """Seconds after which a waiting worker should ask by itself: few while there are no messages."""
        return POLL if self._listening.is_set() else 0.02

    async def close(self) -> None:
        if self._task is None:
            return
        task, self._task = self._task, None
        self._closing = True
        # Cancelled while it connects, the task would leave a socket behind: give it a moment.
        for _ in range(100):
            if self._listening.is_set() or task.done():
                break
            await asyncio.sleep(0.01)
        # The client library may swallow a cancellation: repeat it until the task ends.
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=0.5)

    async def _listen(self) -> None:
        while not self._closing:
            connection = self._connect()
            try:
                await connection.connect()
                await connection.send_command("SUBSCRIBE", self._channel, check_health=False)
                await connection.read_response()
                self._listening.set()
                while not self._closing:
                    self._ring()
                    await connection.read_response(timeout=math.inf)
            except _BROKEN:
                await asyncio.sleep(1.0)
            finally:
                self._listening.clear()
                await connection.disconnect(nowait=True)

    def _ring(self) -> None:
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()


def slices(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut a batch into slices of at most `size`."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


async def _load(connection: Any) -> None:
    """Load both scripts: a server that has lost one has lost the other too."""
    for script in _SCRIPTS:
        await connection.send_command("SCRIPT LOAD", script, check_health=False)
        await connection.read_response()


async def _reply(connection: Any) -> Any:
    """Read one reply. An error from the server is returned as a reply, because more replies may follow."""
    try:
        return await connection.read_response(disable_decoding=True, disconnect_on_error=False)
    except errors.ResponseError as error:
        return error


def _command(*words: bytes) -> bytes:
    return b"".join([b"*%d\r\n" % len(words), *[b"$%d\r\n%b\r\n" % (len(word), word) for word in words]])


def _word(word: bytes | str | int) -> bytes:
    if isinstance(word, bytes):
        return word
    return word.encode("utf-8", "surrogatepass") if isinstance(word, str) else b"%d" % word
