"""File sinks: whatever is torn and whenever it stops, each item arrives once and in order."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.errors import ExportError
from shoal.export.csv import Csv
from shoal.export.files import Cursor, PartFile
from shoal.export.formats import exporter_for
from shoal.export.port import Exporter
from shoal.model import Item

FORMATS = ("jsonl", "json", "csv")


def log(count: int) -> list[Item]:
    return [Item(n, json.dumps({"n": n, "text": f"line {n}"}).encode()) for n in range(1, count + 1)]


def sink(out: Path, job: str = "j1") -> Exporter:
    return exporter_for(str(out), job, csv_raw=True)


def part_of(out: Path) -> Path:
    return Path(f"{out}.part")


def sidecar_of(out: Path) -> Path:
    return Path(f"{out}.part.cursor")


def read(out: Path) -> list[dict[str, Any]]:
    """The rows of a finished file; a CSV gives texts and leaves out empty cells."""
    if out.suffix == ".jsonl":
        data = out.read_bytes()
        assert not data or data.endswith(b"\n")
        return [json.loads(line) for line in data.splitlines()]
    if out.suffix == ".json":
        rows = json.loads(out.read_bytes())
        assert isinstance(rows, list)
        return rows
    with out.open(newline="", encoding="utf-8") as file:
        table = list(csv.reader(file))
    if not table:
        return []
    assert {len(row) for row in table} == {len(table[0])}, "every row is as wide as the header"
    return [{name: cell for name, cell in zip(table[0], row, strict=True) if cell} for row in table[1:]]


def expected(items: list[Item], ending: str) -> list[dict[str, Any]]:
    rows = [json.loads(item.body) for item in items]
    if ending != "csv":
        return rows
    return [{key: str(value) for key, value in row.items()} for row in rows]


def drop(exporter: Exporter) -> None:
    """What the kernel does to a killed process: its descriptors and locks go, nothing else."""
    file: PartFile = exporter._file  # type: ignore[attr-defined]
    fd, file._fd = file._fd, None
    if fd is not None:
        os.close(fd)


@pytest.mark.parametrize("ending", FORMATS)
def test_nothing_shows_under_the_final_name_before_finish(tmp_path: Path, ending: str) -> None:
    out, items = tmp_path / "deep" / "er" / f"o.{ending}", log(5)
    exporter = sink(out)
    assert exporter.open(0) == 0
    exporter.write(items[:3])
    exporter.write(items[1:])  # an overlap is harmless
    exporter.write(items)
    assert not out.exists()
    exporter.finish()
    exporter.close()
    assert read(out) == expected(items, ending)
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize("ending", FORMATS)
def test_no_items_make_an_empty_but_valid_file(tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"o.{ending}"
    exporter = sink(out)
    exporter.open(0)
    exporter.write([])
    exporter.finish()
    assert read(out) == []


@pytest.mark.parametrize("ending", FORMATS)
def test_close_keeps_what_there_is_and_open_goes_on(tmp_path: Path, ending: str) -> None:
    out, items = tmp_path / f"o.{ending}", log(5)
    first = sink(out)
    first.open(0)
    first.write(items[:2])
    first.close()
    first.close()
    second = sink(out)
    assert second.open(999) == 2  # the frontier's cursor is advice only
    second.write(items[2:])
    second.finish()
    assert read(out) == expected(items, ending)


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize(
    ("tear", "goes_on_at"),
    [
        (lambda part, _: part.write_bytes(part.read_bytes() + b'{"n": 4, "te'), 3),
        (lambda part, _: part.write_bytes(part.read_bytes() + b'{"n":4}\n{"n":5}\n'), 3),
        (lambda part, _: part.write_bytes(part.read_bytes()[:-1]), 0),
        (lambda part, _: part.write_bytes(b""), 0),
        (lambda part, _: part.unlink(), 0),
        (lambda _, sidecar: sidecar.unlink(), 0),
        (lambda _, sidecar: sidecar.write_bytes(b""), 0),
        (lambda _, sidecar: sidecar.write_bytes(sidecar.read_bytes()[:-2]), 0),
        (lambda _, sidecar: sidecar.write_bytes(b'\xff{"job"'), 0),
        (lambda _, sidecar: sidecar.write_bytes(b'{"job":"another","seq":3,"bytes":1}'), 0),
    ],
    ids=["torn", "unrecorded", "shorter", "empty", "lost", "no-cursor", "bare", "cut", "noise", "other-job"],
)
def test_a_torn_part_heals(
    tmp_path: Path, ending: str, tear: Callable[[Path, Path], Any], goes_on_at: int
) -> None:
    out, items = tmp_path / f"o.{ending}", log(6)
    first = sink(out)
    first.open(0)
    first.write(items[:3])
    drop(first)
    tear(part_of(out), sidecar_of(out))
    second = sink(out)
    assert second.open(3) == goes_on_at
    second.write(items[goes_on_at:])
    second.finish()
    assert read(out) == expected(items, ending)


@pytest.mark.parametrize("ending", FORMATS)
def test_a_finished_file_stays_until_the_next_one_is_whole(tmp_path: Path, ending: str) -> None:
    out, items = tmp_path / f"o.{ending}", log(4)
    for _ in range(2):
        exporter = sink(out)
        assert exporter.open(4) == 0
        exporter.write(items[:2])
        if out.exists():
            assert read(out) == expected(items, ending)
        exporter.write(items[2:])
        exporter.finish()
        assert read(out) == expected(items, ending)


def test_a_stale_sidecar_never_describes_the_bytes_of_another_job(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    first = sink(out, "a")
    first.open(0)
    first.write(log(2))
    drop(first)
    other = sink(out, "b")
    assert other.open(0) == 0
    with patch.object(PartFile, "_record", side_effect=RuntimeError), pytest.raises(RuntimeError):
        other.write(log(9))
    drop(other)
    assert sink(out, "a").open(0) == 0


class Killed(BaseException):
    """Not an Exception: nothing in the code under test may handle it."""


@contextmanager
def killed_at(step: int, partial: int) -> Iterator[list[int]]:
    """Die at the `step`-th change of the disk; a write may have got `partial` bytes through."""
    seen = [0]
    real_write = os.pwrite

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            if seen[0] == step:
                if real is real_write:
                    real_write(args[0], bytes(args[1])[:partial], args[2])
                raise Killed
            return real(*args, **kwargs)

        return call

    with (
        patch("os.pwrite", counted(os.pwrite)),
        patch("os.fsync", counted(os.fsync)),
        patch("os.ftruncate", counted(os.ftruncate)),
        patch("pathlib.Path.replace", counted_method(Path.replace, seen, step)),
        patch("pathlib.Path.unlink", counted_method(Path.unlink, seen, step)),
    ):
        yield seen


def counted_method(real: Callable[..., Any], seen: list[int], step: int) -> Callable[..., Any]:
    def call(self: Path, *args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if seen[0] == step:
            raise Killed
        return real(self, *args, **kwargs)

    return call


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("partial", [0, 1, 20])
def test_killed_at_any_step(tmp_path: Path, ending: str, partial: int) -> None:
    # The last item brings a new column, so that the CSV is rewritten at the end.
    items = [*log(5), Item(6, b'{"n":6,"late":"x"}')]
    for step in range(1, 200):
        out = tmp_path / str(step) / f"o.{ending}"
        exporter = sink(out)
        died = False
        with killed_at(step, partial):
            try:
                run(exporter, items)
            except Killed:
                died = True
        drop(exporter)
        if out.exists():
            assert read(out) == expected(items, ending), "a final file is whole or absent"
        run(sink(out), items)
        assert read(out) == expected(items, ending)
        assert [path.name for path in out.parent.iterdir() if "tmp" not in path.name] == [out.name]
        if not died:
            return
    pytest.fail("never ran to the end")


def run(exporter: Exporter, items: list[Item]) -> None:
    at = exporter.open(0)
    rest = [item for item in items if item.seq > at]
    for start in range(0, len(rest), 2):
        exporter.write(rest[start : start + 2])
    exporter.finish()


cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
rows = st.dictionaries(st.sampled_from(["a", "b", "c,d", 'e"f', "g\nh", "é"]), cells, min_size=1, max_size=4)
tears = st.one_of(
    st.tuples(st.just("none"), st.just(b"")),
    st.tuples(st.just("extra"), st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("cut"), st.just(b"")),
    st.tuples(st.just("forget"), st.just(b"")),
    st.tuples(st.just("lose"), st.just(b"")),
)
steps = st.lists(st.one_of(st.integers(1, 4), tears), max_size=12)


@pytest.mark.parametrize("ending", FORMATS)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(bodies=st.lists(rows, max_size=14), script=steps)
def test_any_batches_crashes_and_reopens(
    ending: str, bodies: list[dict[str, str]], script: list[int | tuple[str, bytes]]
) -> None:
    items = [Item(n * 3, json.dumps(body).encode()) for n, body in enumerate(bodies, 1)]
    with tempfile.TemporaryDirectory() as folder, patch("os.fsync"):
        out = Path(folder) / f"o.{ending}"
        exporter = sink(out)
        at = exporter.open(0)
        for step in script:
            if isinstance(step, int):
                batch = [item for item in items if item.seq > at][:step]
                exporter.write(batch)
                at = batch[-1].seq if batch else at
                continue
            drop(exporter)
            tear(out, *step)
            exporter = sink(out)
            found = exporter.open(at)
            assert found <= at
            at = found
        exporter.write([item for item in items if item.seq > at])
        exporter.finish()
        assert read(out) == expected(items, ending)


def tear(out: Path, how: str, noise: bytes) -> None:
    part, sidecar = part_of(out), sidecar_of(out)
    if how == "extra":
        part.write_bytes(part.read_bytes() + noise)
    elif how == "cut" and part.stat().st_size:
        os.truncate(part, part.stat().st_size - 1)
    elif how == "forget":
        sidecar.unlink(missing_ok=True)
    elif how == "lose":
        part.unlink()


def test_a_failed_write_can_be_tried_again(tmp_path: Path) -> None:
    out, items = tmp_path / "o.jsonl", log(4)
    exporter = sink(out)
    exporter.open(0)
    exporter.write(items[:1])
    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        real(fd, bytes(data)[:7], offset)
        raise OSError(28, "No space left on device")

    with patch("os.pwrite", full), pytest.raises(ExportError, match="No space left") as refused:
        exporter.write(items[1:])
    assert "free some space" in refused.value.hint
    exporter.write(items[1:2])
    exporter.write(items[1:])
    exporter.finish()
    assert read(out) == expected(items, "jsonl")


def test_short_writes_are_continued(tmp_path: Path) -> None:
    out, items, real = tmp_path / "o.jsonl", log(3), os.pwrite
    with patch("os.pwrite", lambda fd, data, at: real(fd, bytes(data)[:5], at)):
        run(sink(out), items)
    assert read(out) == expected(items, "jsonl")


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    first, second = sink(out), sink(out)
    first.open(0)
    first.write(log(1))
    with pytest.raises(ExportError, match="another process is exporting") as refused:
        second.open(0)
    assert refused.value.hint
    first.finish()
    assert second.open(0) == 0
    second.close()
    assert read(out) == expected(log(1), "jsonl")


def test_the_lock_of_a_killed_process_is_gone(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    code = (
        "import os,signal,sys\nfrom shoal.export.formats import exporter_for\nfrom shoal.model import Item\n"
        f"e=exporter_for({str(out)!r},'j1'); e.open(0); e.write([Item(1,b'1')])\n"
        "sys.stdout.write('up'); sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False)
    assert done.stdout == b"up", done.stderr
    after = sink(out)
    assert after.open(0) == 1
    after.close()


def test_losing_the_race_for_the_part_does_not_harm_the_final_file(tmp_path: Path) -> None:
    """The other process finishes between our open and our lock."""
    out = tmp_path / "o.jsonl"
    first, second = sink(out), sink(out)
    first.open(0)
    first.write(log(2))
    real = os.open
    calls: list[Any] = []

    def late(path: Any, *args: Any, **kwargs: Any) -> int:
        fd = real(path, *args, **kwargs)
        if str(path).endswith(".part") and not calls:
            calls.append(path)
            first.finish()
        return fd

    with patch("os.open", late):
        assert second.open(0) == 0
    second.close()
    assert read(out) == expected(log(2), "jsonl")


def test_errors_are_one_line_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "dir.jsonl").mkdir()
    (tmp_path / "file").write_text("x")
    for out in ("dir.jsonl", "file/o.jsonl", "x" * 300 + ".jsonl"):
        with pytest.raises(ExportError) as refused:
            sink(tmp_path / out).open(0)
        assert "\n" not in str(refused.value)
        assert refused.value.hint
    with pytest.raises(ExportError, match="not a regular file"):
        PartFile(Path("/dev/null"), "j").open()
    with pytest.raises(ExportError, match="not open"):
        sink(tmp_path / "o.jsonl").write(log(1))


def test_the_sidecar_is_what_the_docs_say(tmp_path: Path) -> None:
    exporter = sink(tmp_path / "o.jsonl")
    exporter.open(0)
    exporter.write([Item(7, b"{}")])
    assert json.loads(sidecar_of(tmp_path / "o.jsonl").read_bytes()) == {"job": "j1", "seq": 7, "bytes": 3}
    exporter.close()
    assert Cursor("j1", 7, 3).state is None


def test_raw_line_breaks_in_a_body_do_not_cut_the_record(tmp_path: Path) -> None:
    run(sink(tmp_path / "o.jsonl"), [Item(1, b'{\r\n "a": 1\n}'), Item(2, b'{"a":2}')])
    assert read(tmp_path / "o.jsonl") == [{"a": 1}, {"a": 2}]


def csv_of(tmp_path: Path, *bodies: Any, raw: bool = False) -> list[list[str]]:
    out = tmp_path / "o.csv"
    exporter = Csv(out, "j", raw=raw)
    exporter.open(0)
    for n, body in enumerate(bodies, 1):
        exporter.write([Item(n, json.dumps(body).encode())])
    exporter.finish()
    return list(csv.reader(io.StringIO(out.read_bytes().decode(), newline="")))


def test_csv_flattens_and_keeps_numbers(tmp_path: Path) -> None:
    header, row = csv_of(tmp_path, {"a": 10**30, "b": -1.5e-7, "c": [1, {"x": "y"}], "d": None, "e": True})
    assert header == ["a", "b", "c", "d", "e"]
    assert row == [str(10**30), "-1.5e-07", '[1, {"x": "y"}]', "", "true"]


def test_csv_guards_formulas(tmp_path: Path) -> None:
    evil = ["=1+1", "-x", "@a", "\tx", "\rx", "＝1", "＋a", "－b", "＠c", "+49 30 1"]
    tame = ["+1", "-2.5", "-1e5", "a=1", " ok"]
    got = [row[0] for row in csv_of(tmp_path, *({"=k": cell} for cell in (*evil, *tame, "\0=1")))]
    assert got == ["'=k", *(f"'{cell}" for cell in evil), *tame, "'=1"]
    assert csv_of(tmp_path, {"k": "=1"}, raw=True) == [["k"], ["=1"]]


def test_csv_takes_columns_that_come_late(tmp_path: Path) -> None:
    table = csv_of(tmp_path, {"a": "x\r\ny"}, {}, {"b": 'q"'}, [1], {"a": "z", "c": "1"}, {"a": ""})
    assert table[0] == ["a", "value", "b", "c"]
    assert table[1:] == [
        ["x\r\ny", "", "", ""], ["", "", "", ""], ["", "", 'q"', ""],
        ["", "[1]", "", ""], ["z", "", "", "1"], ["", "", "", ""],
    ]  # fmt: skip


def test_csv_cells_may_be_larger_than_the_csv_module_reads(tmp_path: Path) -> None:
    out = tmp_path / "o.csv"
    exporter = Csv(out, "j")
    exporter.open(0)
    exporter.write([Item(1, json.dumps({"a": "x\n" * 200_000}).encode())])
    exporter.write([Item(2, b'{"b":1}')])
    exporter.finish()
    assert out.read_bytes().startswith(b'a,b\r\n"x\nx\n')
    assert out.read_bytes().endswith(b'x\n",\r\n,1\r\n')


def test_csv_names_an_item_that_is_not_json(tmp_path: Path) -> None:
    exporter = Csv(tmp_path / "o.csv", "j")
    exporter.open(0)
    with pytest.raises(ExportError, match="item 5 is not JSON"):
        exporter.write([Item(5, b"{nope")])
    exporter.close()
