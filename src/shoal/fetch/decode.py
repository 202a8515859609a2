"""Decodes a content encoding without trusting it.

The libraries' own decoders silently accept a truncated stream, and make a gigabyte of a bomb. Here the output
is counted while it grows, and a stream that does not reach its end is `truncated`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence

import brotli

from shoal.errors import FetchError

ACCEPTED = "gzip, deflate, br"
MAX_LAYERS = 2
_STEP = 64 * 1024
# Concatenated gzip members are legal. Each needs a new decoder, so a few megabytes of empty members would
# cost seconds of CPU.
_MAX_MEMBERS = 1024
# Not codings, but servers send them and mean "no coding". Browsers ignore them too.
_NO_CODING = frozenset({"", "identity", "none", "binary", "utf-8", "utf8"})


def layers(content_encoding: str) -> list[str]:
    """Returns the codings of a Content-Encoding value, in the order in which they were applied.

    Raises FetchError: protocol_error for more than MAX_LAYERS, decode_error for a coding that was not asked
    for.
    """
    if not content_encoding:
        return []
    # Cut before the split: the value can be as long as the whole head.
    names = [name.strip().lower() for name in content_encoding[:1024].split(",")]
    codings = [name.removeprefix("x-") for name in names if name not in _NO_CODING]
    if len(codings) > MAX_LAYERS:
        raise FetchError("protocol_error", f"more than {MAX_LAYERS} content encodings on one body")
    for name in codings:
        if name not in ("gzip", "deflate", "br"):
            raise FetchError("decode_error", f"content encoding {name[:40]!r} was not asked for")
    return codings


def decode(
    pieces: Sequence[bytes | bytearray],
    codings: list[str],
    limit: int,
    *,
    cut: bool = False,
    torn: bool = False,
) -> bytes:
    """Returns `pieces` with all `codings` undone, at most `limit` bytes.

    With `cut`, a larger body is cut there. `torn`: the end of the input is missing, and that is not an error.
    Raises FetchError: body_too_large, truncated, decode_error.
    """
    for coding in reversed(codings):
        pieces = _undo(pieces, coding, limit, cut=cut, torn=torn)
        torn = torn or (cut and sum(map(len, pieces)) >= limit)
    return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)


def _undo(
    pieces: Sequence[bytes | bytearray], coding: str, limit: int, *, cut: bool, torn: bool
) -> list[bytes]:
    if not any(pieces):
        return []  # servers send empty bodies without a gzip header
    if len(pieces[0]) < 2:
        pieces = [b"".join(pieces)]  # `_window` needs two bytes
    out: list[bytes] = []
    size = 0
    stream = _brotli(pieces) if coding == "br" else _zlib(pieces, coding)
    try:
        for piece in stream:
            size += len(piece)
            if size > limit and cut:
                out.append(piece[: len(piece) - (size - limit)])
                return out
            if size > limit:
                raise FetchError("body_too_large", f"the decoded body is larger than {limit:,} bytes")
            out.append(piece)
    except (zlib.error, brotli.error):
        raise FetchError("decode_error", f"the body is not valid {coding}") from None
    except FetchError as error:
        if not torn or error.error != "truncated":
            raise
    return out


def _zlib(pieces: Iterable[bytes | bytearray], coding: str) -> Iterator[bytes]:
    decoder = None
    members = 0
    for piece in pieces:
        data: bytes | bytearray = piece
        while data:
            if decoder is None:
                decoder = zlib.decompressobj(_window(data, coding))
            yield decoder.decompress(data, _STEP)
            data = decoder.unconsumed_tail
            if not decoder.eof:
                continue
            data = decoder.unused_data
            members += 1
            if coding != "gzip" or (data and not data.startswith(b"\x1f")):
                return  # bytes after the end are padding
            if members == _MAX_MEMBERS:
                raise FetchError("decode_error", f"more than {_MAX_MEMBERS} gzip members")
            decoder = None
    if decoder is None:
        return
    while True:
        # The decoder has all input, but may not have returned all output.
        rest = decoder.decompress(decoder.unconsumed_tail, _STEP)
        if not rest:
            break
        yield rest
    if not decoder.eof:
        raise FetchError("truncated", f"the {coding} stream is incomplete")


def _window(data: bytes | bytearray, coding: str) -> int:
    if coding == "gzip":
        return 31
    # "deflate" means zlib in the standard, and raw deflate on half of the servers.
    wrapped = len(data) > 1 and data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
    return 15 if wrapped else -15


def _brotli(pieces: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    decoder = brotli.Decompressor()
    for piece in pieces:
        if decoder.is_finished():
            return
        yield decoder.process(piece, output_buffer_limit=_STEP)
        while not decoder.can_accept_more_data() and not decoder.is_finished():
            yield decoder.process(b"", output_buffer_limit=_STEP)
    while not decoder.is_finished():
        rest = decoder.process(b"", output_buffer_limit=_STEP)
        if not rest:
            raise FetchError("truncated", "the br stream is incomplete")
        yield rest
