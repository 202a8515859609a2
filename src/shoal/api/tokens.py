"""Tokens and the scopes of their callers. A token is 32 random bytes; only its SHA-256 is compared.

The owner's token is in a file that only its owner can read, created at the first start. The settings name
more tokens, with fewer rights, by their SHA-256.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from shoal.errors import UsageError
from shoal.settings import NamedToken

CALLER = "shoal.caller"
"""Key of the Caller in a request's scope, once it is known."""
READ, SUBMIT, ADMIN = "read", "submit", "admin"
ALL = frozenset((READ, SUBMIT, ADMIN))
OWNER = "owner"
MIN_LENGTH = 20
"""Minimum characters, so that nobody writes `secret` into the file by hand."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. `named` is false for the local user, who needs no token."""

    name: str
    scopes: frozenset[str]
    named: bool = True


LOCAL = Caller("local", ALL, named=False)


class Tokens:
    """All known tokens. Each lookup compares every one, so its duration reveals nothing."""

    def __init__(self, owner: str, others: Iterable[NamedToken] = ()) -> None:
        """`owner` is the token in the file; "" when there is none."""
        self.known: list[tuple[bytes, Caller]] = []
        """SHA-256 of each token, and its caller."""
        if owner:
            self.known.append((sha256(owner.encode()).digest(), Caller(OWNER, ALL)))
        for token in others:
            scopes = {*token.scopes, READ} | ({SUBMIT} if ADMIN in token.scopes else set())
            self.known.append((bytes.fromhex(token.sha256), Caller(token.name, frozenset(scopes))))
        self.secret = (
            sha256(b"shoal session\0" + owner.encode()).digest() if owner else secrets.token_bytes(32)
        )
        """A secret derived from the owner's token: the same after a restart, and in every service with the
        same token file. Random if there is no token file."""

    def __bool__(self) -> bool:
        return bool(self.known)

    def caller(self, presented: bytes) -> Caller | None:
        """`presented` is bytes: comparing text that is not ASCII raises."""
        digest = sha256(presented).digest()
        found = None
        for known, caller in self.known:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def owner_token(place: str) -> str:
    """Returns the token in the file, which is created if it does not exist; "" if no file is named.

    Raises UsageError.
    """
    if not place:
        return ""
    path = Path(place)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return _read(path)
    except OSError as error:
        raise UsageError(
            f"cannot create the token file {path}: {error.strerror}", hint="choose another with --token-file"
        ) from None
    token = secrets.token_urlsafe(32)
    with os.fdopen(file, "w") as out:
        out.write(token + "\n")
        out.flush()
        os.fsync(out.fileno())
    return token


def _read(path: Path) -> str:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(file, encoding="ascii") as text:
            mode = os.fstat(text.fileno()).st_mode
            token = text.read(4096).strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not plain text"
        raise UsageError(
            f"cannot read the token file {path}: {why}", hint="remove it, or choose another with --token-file"
        ) from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"other users can read the token file {path}", hint=f"chmod 600 {path}")
    if len(token) < MIN_LENGTH:
        raise UsageError(
            f"the token in {path} is shorter than {MIN_LENGTH} characters",
            hint="remove the file: the next start creates one with a random token",
        )
    return token
