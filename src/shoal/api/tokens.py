"""Who may do what. A token is 32 random bytes; only its SHA-256 is compared.

The token of the owner lies in a file that only its owner can read, made at the first start. More tokens,
with fewer rights, come from the settings by their SHA-256.
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
"""Where a request's scope has its Caller, once it is known."""
READ, SUBMIT, ADMIN = "read", "submit", "admin"
ALL = frozenset((READ, SUBMIT, ADMIN))
OWNER = "owner"
MIN_LENGTH = 20
"""Characters: somebody who writes the file by hand must not write `secret` into it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request. `named` is false for the local user, who needs no token."""

    name: str
    scopes: frozenset[str]
    named: bool = True


LOCAL = Caller("local", ALL, named=False)


class Tokens:
    """All tokens that are known. The order of comparing tells nothing: every one is compared."""

    def __init__(self, owner: str, others: Iterable[NamedToken] = ()) -> None:
        """`owner` is the token in the file; "" when there is none."""
        self.known: list[tuple[bytes, Caller]] = []
        """SHA-256 of each, and whose it is."""
        if owner:
            self.known.append((sha256(owner.encode()).digest(), Caller(OWNER, ALL)))
        for token in others:
            scopes = {*token.scopes, READ} | ({SUBMIT} if ADMIN in token.scopes else set())
            self.known.append((bytes.fromhex(token.sha256), Caller(token.name, frozenset(scopes))))
        self.secret = (
            sha256(b"shoal session\0" + owner.encode()).digest() if owner else secrets.token_bytes(32)
        )
        """What nobody can know who does not have the owner's token. The same after a restart, and in every
        service with the same token file."""

    def __bool__(self) -> bool:
        return bool(self.known)

    def caller(self, presented: bytes) -> Caller | None:
        """Bytes, not text: a comparison of text that is not ASCII raises."""
        digest = sha256(presented).digest()
        found = None
        for known, caller in self.known:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def owner_token(place: str) -> str:
    """The token in the file, which is made if it does not exist; "" when no file is named.

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
            f"cannot make the token file {path}: {error.strerror}", hint="--token-file puts it elsewhere"
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
            f"cannot read the token file {path}: {why}", hint="remove it, or name another"
        ) from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"others can read the token file {path}", hint=f"chmod 600 {path}")
    if len(token) < MIN_LENGTH:
        raise UsageError(
            f"the token in {path} is shorter than {MIN_LENGTH} characters",
            hint="remove the file: the next start makes a good one",
        )
    return token
