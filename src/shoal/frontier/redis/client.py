"""The connection to a Redis server: calls in order, the scripts, errors as sentences, and a bell.

`Client` sends calls over one connection and answers their replies in order. `Listener` has a second
connection, on which the scripts publish that something came sooner than a sleeper was told.
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
"""Of the keys; see the map in `prelude.lua`. Another one is refused."""
LEASES_PER_CALL = 50
"""A call must not hold up the others for much longer than a millisecond."""
WINDOW = 8
"""Calls that may be on their way at once: the server never waits for the client to pack."""
POLL = 5.0
"""A sleeper looks so often by itself: a message may be lost with its connection."""
IDLE = 15.0
"""A connection that rested so long is tried before it is trusted."""

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
"""Each verb by the hash of the script that has it."""
_BROKEN = (errors.RedisError, OSError, TimeoutError)
"""What a connection that is not what it was raises."""

_pack = msgspec.msgpack.Encoder().encode


class Client:
    """One prefix on a Redis server. It connects at the first call, and again after a cut."""

    def __init__(self, url: str, clock: clocks.Clock | None) -> None:
        """Raises UsageError when the address cannot be read. Time is the server's unless tests give a
        `clock`."""
        try:
            parts = urlsplit(url)
            options = parse_qs(parts.query)
            name = options.pop("prefix", ["default"])[0]
            query = "&".join(f"{key}={value}" for key, values in options.items() for value in values)
            settings: dict[str, Any] = dict(
                aredis.connection.parse_url(urlunsplit(parts._replace(query=query)))
            )
        except ValueError:
            raise UsageError("this Redis address cannot be read", hint=_HINT) from None
        self.shown = shown(url)
        """The address without its password."""
        if not re.fullmatch(r"/?[0-9]*/?", parts.path):
            raise UsageError(f"{self.shown}: a database of Redis is a number", hint=_HINT)
        if not name or set(name) & set("{}"):
            raise UsageError(f"bad prefix {name!r}", hint="use letters, digits and dashes")
        kind: Any = settings.pop("connection_class", aredis.Connection)
        self._endpoint = str(settings.get("host", "localhost")), int(settings.get("port", 6379))
        settings.setdefault("socket_connect_timeout", 5.0)
        settings.setdefault("socket_timeout", 30.0)
        settings.setdefault("socket_keepalive", True)  # the listener reads for hours
        settings |= {"protocol": 2, "decode_responses": False}
        try:
            kind(**settings)
        except TypeError:
            raise UsageError(f"{self.shown} has an option that does not exist", hint=_HINT) from None
        self._prefix = f"{{shoal:{name}}}:".encode()
        self._clock = clock
        self._tls = parts.scheme == "rediss"
        self._mute = False
        """Something went wrong before or while anybody answered."""
        self._welcome = bool(settings.get("password"))
        """We say who we are; otherwise the server may want to know."""
        self._connect: Callable[[], Any] = lambda: kind(**settings)
        self._connection: Any = None
        self._used = 0.0
        self._lock = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()
        self.listener = Listener(self._connect, self.key("wake"))

    async def greet(self) -> int:
        """Marks an empty server as ours. Returns how many jobs have ended there. Raises a FrontierError that
        says what is wrong with the server."""
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
                f"{self.shown} has layout {layout}, this release knows {LAYOUT}",
                hint="upgrade shoal, or use another ?prefix=",
            )
        return int(version)

    async def close(self) -> None:
        await self.listener.close()
        if self._under_way:
            await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._drop(gently=True)
        await asyncio.sleep(0)  # transports that were dropped before close in the loop's next turn

    def key(self, name: str, number: int | None = None) -> bytes:
        """The name of a key of the map in `prelude.lua`."""
        tail = "" if number is None else f":{number}"
        return self._prefix + f"{name}{tail}".encode()

    def pack(self, verb: str, values: Any, *more: bytes) -> bytes:
        """The call of a verb for `ask`."""
        clock = b"" if self._clock is None else b"%d" % microseconds(self._clock())
        words = (_SHA_OF[verb], b"1", self._prefix, verb.encode(), clock, _pack(values))
        return _command(b"EVALSHA", *words, *more)

    async def call(self, verb: str, values: Any, *more: bytes) -> Any:
        """Calls one verb. Any: its type is known to the verb, not to the types."""
        [reply] = await self.ask([self.pack(verb, values, *more)])
        return reply

    async def walk(self, verb: str, values: list[Any]) -> None:
        """Calls a verb that goes through the lanes of a job, some in each call."""
        cursor = "0"
        while (cursor := (await self.call(verb, [*values, cursor])).decode()) != "0":
            pass

    async def command(self, *words: bytes | str | int) -> Any:
        """Sends a plain command. Any: what it answers is known to the command, not to the types."""
        [reply] = await self.ask([_command(*map(_word, words))])
        return reply

    async def ask(self, commands: Iterable[bytes]) -> list[Any]:
        """Sends commands and returns their replies in order. Goes on when the caller is cancelled."""
        task = asyncio.create_task(self._exchange(commands))
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone: then nobody else looks

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
                    # Somebody flushed the scripts, or a replica took over: nothing of these ran.
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
            if not self._welcome:
                # A server that wants a password answers a long script by closing the connection.
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
        """What Redis says becomes what a person can use. Its own words may hold the address with
        the password only in connection errors; those are told by their kind."""
        text = str(error)
        if not self._welcome and isinstance(error, errors.AuthenticationError):
            raise FrontierError(
                f"Redis at {self.shown} needs a password",
                hint="redis://:password@host:port/0; redis:// alone takes REDIS_HOST and REDIS_PASSWORD",
            ) from None
        if isinstance(error, errors.AuthenticationError | errors.NoPermissionError) or "NOAUTH" in text:
            raise FrontierError(
                f"{self.shown} refuses the user or password",
                hint="redis://user:password@host:port/0; the user needs scripts and keys of its prefix",
            ) from None
        if isinstance(error, errors.OutOfMemoryError) or text.startswith("OOM"):
            raise FrontierFull(
                f"{self.shown} has no memory left",
                hint="raise maxmemory, or let finished jobs be exported and removed: nothing is lost",
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
                hint="wait until it has started",
                server=self.shown,
            ) from None
        if "CERTIFICATE_VERIFY_FAILED" in text:
            raise FrontierError(
                f"the certificate of {self.shown} is not trusted",
                hint="name its authority: rediss://host:port/0?ssl_ca_certs=/path/to/ca.pem",
            ) from None
        if isinstance(error, errors.InvalidResponse):
            raise FrontierError(
                f"{self.shown} does not answer as Redis does", hint=_WRONG_PORT[self._tls]
            ) from None
        if isinstance(error, errors.ConnectionError | errors.TimeoutError | OSError | TimeoutError):
            self._mute = True
            raise FrontierUnreachable(
                f"{self.shown} does not answer",
                hint="check that the server runs and the address is right",
                server=self.shown,
            ) from None
        raise FrontierError(f"{self.shown}: {text}", hint="`shoal doctor` looks closer") from error


class Listener:
    """Rings a bell for each message of a channel, on a connection of its own."""

    def __init__(self, connect: Callable[[], Any], channel: bytes) -> None:
        self._connect = connect
        self._channel = channel
        self._bell = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._closing = False

    def start(self) -> None:
        """Listens from now on. Nothing happens if it does already."""
        if self._task is None:
            self._task = asyncio.create_task(self._listen())

    @property
    def bell(self) -> asyncio.Event:
        """Rings once, at the next message. Take it before asking what there is, and nothing is missed."""
        return self._bell

    @property
    def poll(self) -> float:
        """After how many seconds a sleeper should look by itself: soon where nothing can ring."""
        return POLL if self._listening.is_set() else 0.02

    async def close(self) -> None:
        if self._task is None:
            return
        task, self._task = self._task, None
        self._closing = True
        # Cancelled while it connects, it would leave a socket behind: give it a moment.
        for _ in range(100):
            if self._listening.is_set() or task.done():
                break
            await asyncio.sleep(0.01)
        # The client library may swallow a cancellation: ask until it is over.
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
    """A batch cut into what single calls take."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


async def _load(connection: Any) -> None:
    """Both scripts: a server that has lost one has lost the other too."""
    for script in _SCRIPTS:
        await connection.send_command("SCRIPT LOAD", script, check_health=False)
        await connection.read_response()


async def _reply(connection: Any) -> Any:
    """One reply. An error that the server answered is a reply too: more may be under way."""
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
