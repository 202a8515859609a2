"""What all exporters to files share: a reader of the final file never sees half a record.

While a job runs, records go to `<out>.part`. A sidecar `<out>.part.cursor` records the last item and the
number of valid bytes in the part; it is replaced only after those bytes are on disk. Anything that a crash
leaves after the valid bytes (a torn line, a batch that was written but not recorded) is cut off at the next
`open`. `finish` renames the part to its final name.

A job without items replaces nothing: what an earlier job left, complete or not, stays.

The sidecar decides where to continue, not the cursor in the frontier, which cannot know that the file was
deleted.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from shoal.errors import ExportError

_HINTS = {
    errno.ENOSPC: "free some space and run the same command again: it continues where it stopped",
    errno.EDQUOT: "free some space and run the same command again: it continues where it stopped",
    errno.EACCES: "choose a place where you have permission to write",
    errno.EPERM: "choose a place where you have permission to write",
    errno.EROFS: "choose a place where you have permission to write",
    errno.EISDIR: "give a file name, or end the path with / for one Markdown file per item",
    errno.ENOTDIR: "a part of the path is a file, not a directory: choose another path",
    errno.EEXIST: "a part of the path is a file, not a directory: choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
}


class Cursor(Struct, frozen=True, omit_defaults=True):
    """The sidecar: the first `bytes` of the part hold all items up to `seq` of `job`."""

    job: str
    seq: int = 0
    bytes: int = 0
    state: Any = None
    """What the format needs in order to continue (the columns of a CSV file)."""


@contextmanager
def export_errors(path: Path) -> Iterator[None]:
    """Turn an error of the operating system inside the body into an ExportError about `path`."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = _HINTS.get(error.errno or 0, "check the path and run the same command again")
        raise ExportError(f"cannot write {path}: {reason}", hint=hint) from error


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names in a directory, survive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of `path`. Whenever the process dies, it holds either the old content or all of
    `data`.

    Not synced: after a power failure it may hold less.
    """
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_bytes(data)
    fresh.replace(path)


class PartFile:
    """A file that grows by whole batches and appears under its name only when complete.

    Locked from `open` to `finish` or `close`: a second process gets an ExportError.
    """

    def __init__(self, out: Path, job: str, *, part: Path | None = None, cursor: Path | None = None) -> None:
        self.out = out
        self.part = part or out.with_name(f"{out.name}.part")
        self._sidecar = cursor or self.part.with_name(f"{self.part.name}.cursor")
        self._at = Cursor(job)
        self._fd: int | None = None
        self._others = False
        """The part is the unfinished work of another job. The first item of this job replaces it."""

    @property
    def at(self) -> Cursor:
        """The durable state so far."""
        return self._at

    def open(self) -> Cursor:
        """Lock the part and cut off what was not recorded. Returns where to continue."""
        with export_errors(self.out):
            if self.out.is_dir():
                raise IsADirectoryError(errno.EISDIR, "")
            if self.out.exists() and not self.out.is_file():
                # `finish` renames over it, which would delete a device or a pipe such as /dev/null.
                raise ExportError(
                    f"cannot write {self.out}: it is not a regular file", hint="give a file name"
                )
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._fd = self._lock()
            try:
                self._at = self._repair(self._fd)
            except BaseException:
                self.close()
                raise
        return self._at

    def append(self, data: bytes, seq: int, state: Any = None) -> None:
        """Add whole records that end with item `seq`. They are durable when it returns."""
        fd = self._open_fd()
        with export_errors(self.out):
            if self._others:
                self._clear(fd)
            _write_all(fd, data, self._at.bytes)
            os.fsync(fd)
            after = Cursor(self._at.job, seq, self._at.bytes + len(data), state)
            self._record(after)
        # Only now: after a failure the next append overwrites from the old offset.
        self._at = after

    def finish(
        self, tail: bytes = b"", *, rewrite: Callable[[BinaryIO, BinaryIO], None] | None = None
    ) -> bool:
        """Move the file to its final place, with `tail` appended, or as `rewrite` copies it.

        Returns False, and changes nothing, if there is no item and an earlier file exists.

        Until the rename everything can be repeated: a crash before it costs only the work since the last
        sidecar, a crash after it leaves at most a stale sidecar that `open` ignores.
        """
        fd = self._open_fd()
        if not self._at.bytes and (self._others or self.out.exists()):
            self.close()
            return False
        with export_errors(self.out):
            os.ftruncate(fd, self._at.bytes)
            if rewrite is None:
                _write_all(fd, tail, self._at.bytes)
                os.fsync(fd)
                self.part.replace(self.out)
            else:
                self._rewrite(rewrite).replace(self.out)
            sync(self.out.parent)
            self._sidecar.unlink(missing_ok=True)
            self.part.unlink(missing_ok=True)
        self._unlock()
        return True

    def close(self) -> None:
        """Unlock the file; a later `open` continues. Harmless if it is not open."""
        if self._fd is None:
            return
        if not self._at.bytes and not self._others:
            # There is nothing to continue from.
            with export_errors(self.out):
                self.part.unlink(missing_ok=True)
        self._unlock()

    def _open_fd(self) -> int:
        if self._fd is None:
            raise ExportError(f"{self.out} is not open for writing", hint="call open() first")
        return self._fd

    def _unlock(self) -> None:
        fd, self._fd = self._open_fd(), None
        os.close(fd)

    def _lock(self) -> int:
        while True:
            fd = os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(fd, self.part):
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise ExportError(
                    f"another process is exporting to {self.out}",
                    hint="wait until it has finished, or export to another file",
                ) from None
            except BaseException:
                os.close(fd)
                raise
            # The other process finished between our open and our lock: this is now its *final* file, and
            # truncating that would destroy it.
            os.close(fd)

    def _repair(self, fd: int) -> Cursor:
        """Cut off what the sidecar does not record. Returns where to continue."""
        known = self._read_sidecar()
        whole = known is not None and 0 < known.bytes <= os.fstat(fd).st_size
        if known is not None and whole and known.job == self._at.job:
            os.ftruncate(fd, known.bytes)
            return known
        self._others = whole
        if not whole:
            self._clear(fd)
        return Cursor(self._at.job)

    def _clear(self, fd: int) -> None:
        # The old sidecar is removed first: it must never describe bytes that are not its own.
        self._sidecar.unlink(missing_ok=True)
        sync(self.part.parent)
        os.ftruncate(fd, 0)
        self._others = False

    def _read_sidecar(self) -> Cursor | None:
        try:
            return msgspec.json.decode(self._sidecar.read_bytes(), type=Cursor)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _record(self, cursor: Cursor) -> None:
        # Not synced, which would double the cost of a batch: a power failure leaves an older sidecar (then
        # those items are written again) or an unreadable one (then all are).
        replace_file(self._sidecar, msgspec.json.encode(cursor))

    def _rewrite(self, rewrite: Callable[[BinaryIO, BinaryIO], None]) -> Path:
        whole = self.part.with_name(f"{self.part.name}.whole")
        with self.part.open("rb") as source, whole.open("wb") as target:
            rewrite(source, target)
            target.flush()
            os.fsync(target.fileno())
        return whole


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _write_all(fd: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written
