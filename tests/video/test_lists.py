from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from capvid.errors import UsageError
from capvid.utils.storage import Blob, parse_path
from capvid.video.input_lists import read_list, read_piped
from capvid.video.input_set import find_videos, iter_videos

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

NAMES = [
    "a.mp4",
    "  two  spaces .mp4",
    'it\'s "quoted", é.mp4',
    "s3://b/x y.mp4",
    "电影/🎬.mkv",
    "new\nline.mp4",
]


def table(path: Path, *rows: str, delimiter: str = ",") -> Path:
    """Write cells, quoted where that is needed."""
    import csv

    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([row.split("|") for row in rows])
    return path


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".CSV", ",")])
def test_a_column_of_a_table(tmp_path: Path, suffix: str, delimiter: str) -> None:
    rows = [f"{number}|{name}|{number * 2}" for number, name in enumerate(NAMES)]
    path = table(tmp_path / f"list{suffix}", "id|path|n", *rows, "7||9", "8", delimiter=delimiter)
    assert list(read_list(path)) == [parse_path(name) for name in NAMES]
    assert list(read_list(path, "n"))[:2] == [Path("0"), Path("2")]


def test_which_column_is_taken(tmp_path: Path) -> None:
    path = table(tmp_path / "list.csv", "file|url|video", "1|2|3")
    assert list(read_list(path)) == [Path("3")]
    assert list(read_list(path, "file")) == [Path("1")]
    path = table(tmp_path / "none.csv", "name|title", "1|2")
    with pytest.raises(
        UsageError, match=r"no column named video, path, .*video_path \(it has name, title\); name the column"
    ):
        list(read_list(path))
    with pytest.raises(UsageError, match=r"no column x .*; name the column with --column"):
        list(read_list(path, "x"))
    (tmp_path / "empty.csv").touch()
    with pytest.raises(UsageError, match="it has none"):
        list(read_list(tmp_path / "empty.csv"))


def test_a_table_as_programs_write_it(tmp_path: Path) -> None:
    """A mark at its beginning, carriage returns, and bytes that are no text."""
    (tmp_path / "list.csv").write_bytes(b"\xef\xbb\xbfvideo,n\r\nx\xff.mp4,1\r\n\r\ny.mp4,2\r\n")
    found = list(read_list(tmp_path / "list.csv"))
    assert [os.fsencode(path) for path in found] == [b"x\xff.mp4", b"y.mp4"]
    (tmp_path / "long.csv").write_text("video,text\na.mp4," + "x" * 200_000 + "\n")
    with pytest.raises(UsageError, match=r"long.csv, line \d: not CSV"):
        list(read_list(tmp_path / "long.csv"))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_a_column_of_parquet(tmp_path: Path, kind: pa.DataType) -> None:
    values = [*NAMES, None, ""]
    cells = [None if v is None else v.encode() for v in values] if kind == pa.binary() else values
    path = tmp_path / "list.parquet"
    parquet.write_table(pa.table({"n": range(len(values)), "video": pa.array(cells).cast(kind)}), path)
    assert list(read_list(path)) == [parse_path(name) for name in NAMES]
    assert list(read_list(path, "n"))[:2] == [Path("1"), Path("2")]  # a zero is nothing
    with pytest.raises(UsageError, match="no column clip"):
        list(read_list(path, "clip"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match=r"list.parquet: not Parquet that can be read"):
        list(read_list(path))


def test_lines_have_no_columns(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("".join(f"{name}\n" for name in NAMES[:5]))
    assert list(read_list(tmp_path / "list.txt")) == [parse_path(name) for name in NAMES[:5]]
    with pytest.raises(UsageError, match="a text file has no columns; leave out --column"):
        list(read_list(tmp_path / "list.txt", "video"))
    with pytest.raises(UsageError, match=r"missing.txt: the list cannot be read"):
        list(read_list(tmp_path / "missing.txt"))


def test_many_lines_with_nul_between_them(tmp_path: Path) -> None:
    names = [f"{number}\n{'x' * 50}.mp4" for number in range(5000)]  # more than is looked at first
    (tmp_path / "list").write_bytes(b"".join(name.encode() + b"\0" for name in names))
    assert list(read_list(tmp_path / "list")) == [Path(name) for name in names]
    names = [f"{number}{'x' * 50}.mp4" for number in range(5000)]
    (tmp_path / "list").write_bytes(b"".join(name.encode() + b"\r\n" for name in names))
    assert list(read_list(tmp_path / "list")) == [Path(name) for name in names]


def test_lists_at_an_address(memory: None, tmp_path: Path) -> None:
    table(tmp_path / "list.csv", "video", *NAMES)
    parquet.write_table(pa.table({"video": NAMES}), tmp_path / "list.parquet")
    for name in ("list.csv", "list.parquet"):
        fsspec.filesystem("memory").pipe(f"/lists/{name}", (tmp_path / name).read_bytes())
        assert list(read_list(Blob(f"memory://lists/{name}"))) == [parse_path(entry) for entry in NAMES]
    with pytest.raises(UsageError, match=r"memory://lists/x.txt: the list cannot be read \(there is no such"):
        list(read_list(Blob("memory://lists/x.txt")))


def test_rows_that_come_again_are_one_video(tmp_path: Path) -> None:
    path = table(tmp_path / "list.csv", "video", "a.mp4", "s3://b/x.mp4", "./a.mp4", "b.mp4", "s3://b/x.mp4")
    expected = ["a.mp4", "s3://b/x.mp4", "b.mp4"]
    assert [str(video.path) for video in iter_videos([], listed=read_list(path))] == expected
    assert [str(video.path) for video in find_videos([], listed=read_list(path))] == expected


def test_names_that_differ_in_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(b"x\xff.mp4\nx\xfe.mp4\nx\xff.mp4\n")
    found = list(iter_videos([], listed=read_list(tmp_path / "list")))
    assert [os.fsencode(video.path) for video in found] == [b"x\xff.mp4", b"x\xfe.mp4"]
    assert len({video.key for video in found}) == 2


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        (b'video,start\na.mp4,0\n"b, c.mp4",1\n', None, ["a.mp4", "b, c.mp4"]),
        (b"\xef\xbb\xbfid\tpath\r\n1\ta b.mp4\r\n2\tc.mp4\r\n", None, ["a b.mp4", "c.mp4"]),
        (b"video\na.mp4\nb.mp4\n", None, ["a.mp4", "b.mp4"]),
        (b"clip,n\na.mp4,1\n", "clip", ["a.mp4"]),
        (b"n\tclip\n1\ta.mp4\n", "clip", ["a.mp4"]),
        (b"a.mp4\nvideo\n", None, ["a.mp4", "video"]),
        (b"one, two.mp4\n", None, ["one, two.mp4"]),
        (b"video,1.mp4\nb.mp4\n", None, ["video,1.mp4", "b.mp4"]),  # there is such a file
        (b"video,2.mp4\0b.mp4\0", None, ["video,2.mp4", "b.mp4"]),
        (b"", None, []),
    ],
)
def test_a_list_on_stdin_may_be_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, column: str | None, expected: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("video,1.mp4").touch()
    assert list(read_piped(text, column)) == [Path(name) for name in expected]


def test_errors_of_tables_on_stdin(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^stdin: no column clip \(it has video, n\); name the column"):
        list(read_piped(b"video,n\na.mp4,1\n", "clip"))
    parquet.write_table(pa.table({"video": ["a.mp4"]}), tmp_path / "list.parquet")
    assert list(read_piped((tmp_path / "list.parquet").read_bytes())) == [Path("a.mp4")]
    with pytest.raises(UsageError, match=r"^stdin: not Parquet that can be read"):
        list(read_piped(b"PAR1" * 10))
