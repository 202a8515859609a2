"""Parquet: one row per item, one column per key, each column with the one type that fits all its values.

The types are known only at the end, and a Parquet file cannot continue to grow after a crash. So items are
collected as JSON Lines, which can, and `finish` converts them: it reads them twice, one group of rows at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from shoal.errors import MissingExtra
from shoal.export.jsonl import JsonLines

try:
    import pyarrow
    import pyarrow.parquet
except ModuleNotFoundError:
    raise MissingExtra("writing Parquet", "parquet") from None

GROUP = 8 * 1024 * 1024
"""Bytes of JSON in one group of rows."""
_LONE = "value"
"""The column of items that are not objects, and of objects without any key."""
_INT64 = range(-(1 << 63), 1 << 63)


class Parquet(JsonLines):
    """An exporter that writes a Parquet file. Values that share no type are written as JSON text."""

    def finish(self) -> bool:
        return self._file.finish(rewrite=_convert)


def _convert(source: BinaryIO, target: BinaryIO) -> None:
    kinds: dict[str, str] = {}
    for rows in _groups(source):
        for row in rows:
            for name, value in row.items():
                if value is not None:
                    kinds[name] = _common_kind(kinds.get(name, ""), _kind(value))
                else:
                    kinds.setdefault(name, "")
    source.seek(0)
    schema = pyarrow.schema([(name, _TYPES[kind]) for name, kind in kinds.items()])
    with pyarrow.parquet.ParquetWriter(target, schema, compression="zstd") as writer:
        for rows in _groups(source):
            columns = [
                pyarrow.array([_value_as(row.get(name), kind) for row in rows], _TYPES[kind])
                for name, kind in kinds.items()
            ]
            writer.write_table(pyarrow.table(columns, schema=schema))


_TYPES = {
    "": pyarrow.string(),
    "bool": pyarrow.bool_(),
    "int": pyarrow.int64(),
    "float": pyarrow.float64(),
    "text": pyarrow.string(),
    "texts": pyarrow.list_(pyarrow.string()),
    "json": pyarrow.string(),
}


def _groups(source: BinaryIO) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    size = 0
    for line in source:
        value = msgspec.json.decode(line)
        if not isinstance(value, dict):
            value = {_LONE: value}
        rows.append(value or {_LONE: None})
        size += len(line)
        if size >= GROUP:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "bool"
        case int():
            return "int" if value in _INT64 else "json"
        case float():
            return "float"
        case str():
            return "text"
        case list() if all(isinstance(each, str) for each in value):
            return "texts"
    return "json"


def _common_kind(one: str, other: str) -> str:
    """Returns the kind that can hold values of both."""
    if not one or one == other:
        return other
    return "float" if {one, other} == {"int", "float"} else "json"


def _value_as(value: Any, kind: str) -> Any:
    if value is None or kind != "json":
        return float(value) if kind == "float" and value is not None else value
    return msgspec.json.encode(value).decode()
