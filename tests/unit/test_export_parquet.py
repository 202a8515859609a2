"""Parquet: types fit all values of a column, and an export that was torn goes on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet as arrow

from shoal.errors import MissingExtra
from shoal.export import parquet
from shoal.export.formats import exporter_for
from shoal.export.parquet import Parquet
from shoal.model import Item


def items(*values: Any) -> list[Item]:
    return [Item(seq, msgspec.json.encode(value)) for seq, value in enumerate(values, 1)]


def exported(out: Path, *values: Any) -> Any:
    exporter = Parquet(out, "job")
    exporter.open(0)
    if values:
        exporter.write(items(*values))
    exporter.finish()
    exporter.close()
    return arrow.read_table(out)


def test_each_column_has_the_type_that_fits(tmp_path: Path) -> None:
    table = exported(
        tmp_path / "out.parquet",
        {"url": "a", "status": 200, "score": 1, "ok": True, "links": ["x", "y"], "odd": 1, "none": None},
        {"url": "b", "score": 0.5, "links": [], "odd": {"a": [1]}, "big": 1 << 70},
    )
    assert {field.name: str(field.type) for field in table.schema} == {
        "url": "string",
        "status": "int64",
        "score": "double",
        "ok": "bool",
        "links": "list<element: string>",
        "odd": "string",
        "none": "string",
        "big": "string",
    }
    first, second = table.to_pylist()
    assert (first["score"], first["odd"], first["links"]) == (1.0, "1", ["x", "y"])
    assert (second["odd"], second["status"], second["big"]) == ('{"a":[1]}', None, str(1 << 70))


def test_what_is_not_an_object_has_a_column_too(tmp_path: Path) -> None:
    assert exported(tmp_path / "a.parquet", "text", "more").to_pylist() == [
        {"value": "text"},
        {"value": "more"},
    ]
    assert exported(tmp_path / "b.parquet", {}, {"a": 1}).to_pylist() == [
        {"value": None, "a": None},
        {"value": None, "a": 1},
    ]
    assert exported(tmp_path / "c.parquet", 0, 1).to_pylist() == [{"value": 0}, {"value": 1}]
    assert exported(tmp_path / "d.parquet").num_rows == 0


def test_a_torn_export_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    every = items(*({"n": number} for number in range(10)))
    first = Parquet(out, "job")
    first.open(0)
    first.write(every[:4])
    first.close()
    assert not out.exists()
    second = Parquet(out, "job")
    assert second.open(0) == 4
    second.write(every[2:])
    second.finish()
    assert arrow.read_table(out).column("n").to_pylist() == list(range(10))
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def test_rows_come_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "GROUP", 100)
    exported(tmp_path / "out.parquet", *({"n": number, "text": "x" * 30} for number in range(20)))
    assert arrow.ParquetFile(tmp_path / "out.parquet").num_row_groups > 3


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), VALUES), min_size=1, max_size=6))
def test_whatever_the_items_every_row_arrives(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any]
) -> None:
    table = exported(tmp_path_factory.mktemp("any") / "out.parquet", *rows)
    assert table.num_rows == len(rows)
    for row, kept in zip(rows, table.to_pylist(), strict=True):
        for name, value in row.items():
            assert (kept[name] is None) == (value is None)


def test_without_its_library_it_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shoal.export.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra) as missing:
        exporter_for("x.parquet", "job")
    assert "pip install" in missing.value.hint and "[parquet]" in missing.value.hint
