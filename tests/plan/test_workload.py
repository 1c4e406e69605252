"""``Workload``: traffic from steps, counters, histograms and files."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphdispatch import CUDAGraphStats
from graphdispatch.engines import DispatchKey
from graphdispatch.errors import ConfigError
from graphdispatch.plan import Workload
from graphdispatch.runtime.replay import count_hit

from ..helpers import hit

CSV = "step,num_tokens,num_reqs,uniform_decode\n0,7,1,0\n1,3,3,1\n2,3,3,true\n"
LOG = """INFO 01-02 10:00:00 [cuda_graph.py:99] **CUDAGraph Stats:**
| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode            | Count |
|-----------------|---------------|--------------|-------------------------|-------|
| 3               | 4             | 1            | CUDAGraphMode.FULL      | 12    |
| 30              | 32            | 2            | CUDAGraphMode.PIECEWISE | 2     |

INFO 01-02 10:00:10 [loggers.py:1] 7 | 8 | unrelated | line
(APIServer pid=1) INFO [cuda_graph.py:99] | Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
(APIServer pid=1) INFO [cuda_graph.py:99] | 3               | 4             | 1            | FULL         | 5     |
(APIServer pid=1) INFO [cuda_graph.py:99] | 900             | 900           | 0            | NONE: mixed_batch | 1     |
"""


def counted(workload: Workload) -> dict[Any, tuple[float, float]]:
    """The weights of uniform decode and of all others, by shape."""
    shapes, decode, mixed = workload.histogram
    return dict(zip(map(tuple, shapes.tolist()), zip(decode, mixed, strict=True), strict=True))


def put(folder: Path, content: str, name: str = "trace.csv") -> Path:
    """A file of this content, compressed if its name says so."""
    data = content.encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return folder / name


def test_steps_are_counted_by_shape_and_kind() -> None:
    """In order; numbers of any integer type."""
    workload = Workload.from_steps(np.array([3, 5, 3], np.int32), [True, False, False])
    assert counted(workload) == {(3,): (1, 1), (5,): (0, 1)}
    assert (workload.total, workload.largest, workload.is_ordered) == (3, 5, True)
    assert repr(workload) == "<Workload 3 steps of 2 shapes up to 5 tokens, 33.3 % uniform decode, in order>"


def test_steps_may_have_several_dimensions_or_be_keys() -> None:
    """Tuples with a size for each; of keys the tokens count, and prefill is no decode."""
    assert counted(Workload.from_steps([(2, 8), (2, 8), (1, 16)])) == {(1, 16): (1, 0), (2, 8): (2, 0)}
    keys = [DispatchKey(4, 4), DispatchKey(90, 2, is_prefill=True)]
    assert counted(Workload.from_steps(keys)) == {(4,): (1, 0), (90,): (0, 1)}


def test_a_histogram_says_how_much_of_it_is_decode() -> None:
    """By default all; it has no order."""
    assert counted(Workload.from_histogram({4: 2.0, 1: 0.5})) == {(1,): (0.5, 0), (4,): (2, 0)}
    part = Workload.from_histogram({4: 2.0, 9: 3.0}, {4: 0.5})
    assert counted(part) == {(4,): (0.5, 1.5), (9,): (0, 3)}
    with pytest.raises(ConfigError, match="without an order cannot split"):
        part.split()


def test_live_counters_are_a_workload() -> None:
    """Hits and eager calls by their rows; a wrapper's counters know none."""
    stats = CUDAGraphStats()
    for rows in (3, 3, 8):
        count_hit(stats, hit(rows, 8))
    assert counted(Workload.from_stats(stats)) == {(3,): (2, 0), (8,): (1, 0)}
    with pytest.raises(ConfigError, match="stats must have counted calls by rows"):
        Workload.from_stats(CUDAGraphStats(knows_rows=False))


def test_a_split_is_in_time() -> None:
    """Both sides keep their order and kinds."""
    first, rest = Workload.from_steps([1, 2, 3, 4], [True, False, True, True]).split(0.25)
    assert (counted(first), counted(rest)) == ({(1,): (1, 0)}, {(2,): (0, 1), (3,): (1, 0), (4,): (1, 0)})
    with pytest.raises(ConfigError, match="fraction must leave steps on both sides"):
        first.split()


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_csv_is_read_plain_and_compressed(name: str, tmp_path: Path) -> None:
    """Columns by name; other columns and spaces behind commas are ignored."""
    for content in (CSV, CSV.replace(",", ", ")):
        assert counted(Workload.from_trace(put(tmp_path, content, name))) == {(3,): (2, 0), (7,): (0, 1)}


def test_json_lines_and_several_columns_are_read(tmp_path: Path) -> None:
    """Without a column of kinds, a step with a token for each request is decode."""
    path = put(
        tmp_path, '{"num_tokens": 3, "num_reqs": 3, "length": 16}\n{"num_tokens": 9, "num_reqs": 2, "length": 8}\n'
    )
    assert counted(Workload.from_trace(path)) == {(3,): (1, 0), (9,): (0, 1)}
    assert counted(Workload.from_trace(path, ["num_reqs", "length"])) == {(2, 8): (1, 0), (3, 16): (1, 0)}


def test_parquet_is_read(tmp_path: Path) -> None:
    """Where pyarrow is installed; a file that is none says so."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"num_tokens": [1, 2, 2], "is_decode": [True, False, False]})
    parquet.write_table(table, tmp_path / "t.parquet")
    assert counted(Workload.from_trace(tmp_path / "t.parquet")) == {(1,): (1, 0), (2,): (0, 2)}
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        Workload.from_trace(put(tmp_path, "PAR1xxxx", "bad.parquet"))


def test_the_tables_of_a_vllm_log_are_read(tmp_path: Path) -> None:
    """They add up; steps by FULL graphs are decode; other lines are ignored."""
    workload = Workload.from_trace(put(tmp_path, LOG, "server.log"))
    assert counted(workload) == {(3,): (17, 0), (30,): (0, 2), (900,): (0, 1)}
    assert not workload.is_ordered


BAD_FILES: list[tuple[Any, ...]] = [
    ("", "has no steps"),
    ("tokens\n3\n", "line 2: expected num_tokens from 1"),
    ("num_tokens\n3\nx\n", "line 3: expected num_tokens from 1 to 1048576"),
    ("num_tokens\n3\n0\n", r"line 3: .*got \{'num_tokens': '0'\}"),
    ("num_tokens,uniform_decode\n3,2\n", "line 2: .*uniform_decode as 0 or 1"),
    ("num_tokens,num_reqs\n3,\n", "line 2: .*num_reqs and count as integers"),
    ('{"num_tokens": 3}\n{"num_tokens"\n', "line 2 is not JSON"),
    ('{"num_tokens": 3.5}\n', "line 1: expected num_tokens"),
    ("| Unpadded Tokens | Padded Tokens |\n", "has no steps"),
    ("num_tokens,count\n3,0\n", "line 2: .*count as integers"),
    (f"num_tokens,count\n3,{'9' * 400}\n", "line 2: .*count as integers"),
    (f'num_tokens\n3\n"{"3" * 200_000}"\n', "line 3 is not CSV: field larger"),
    ('{"num_tokens": 3}\n' + "[" * 200_000 + "\n", "line 2 is not JSON"),
    ('{"num_tokens": 3}\n[3]\n', "line 2: expected num_tokens"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES)
def test_a_bad_file_is_named_with_its_line(content: str, message: str, tmp_path: Path) -> None:
    """And with what was expected."""
    with pytest.raises(ConfigError, match=rf"trace\.csv.*{message}"):
        Workload.from_trace(put(tmp_path, content))


@pytest.mark.parametrize("content", [b"\xff\xfe\xfd\xfc", None, gzip.compress(b"a" * 5000)[:-20]])
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    """No text, not there, or cut."""
    path = tmp_path / "trace.csv.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"trace\.csv\.gz cannot be read"):
        Workload.from_trace(path)


IMPOSSIBLE: list[tuple[Any, ...]] = [
    ("steps", ([],), "steps must hold at least one"),
    ("steps", ([True],), "steps must hold at least one integer"),
    ("steps", ([1, (2, 3)],), "steps must hold at least one integer, or tuple of integers, all equally long"),
    ("steps", ([1, 0],), r"steps\[1\] must be from 1 to 1048576, got 0"),
    ("steps", ([1, 2**21],), r"steps\[1\] must be from 1 to 1048576"),
    ("steps", ([1, 2], [True]), "is_decode must hold a boolean for each of 2 steps"),
    ("steps", ([1], [3]), "is_decode must hold a boolean"),
    ("histogram", ({},), "counts must hold at least one"),
    ("histogram", ({1: 0.0},), "one at least above 0"),
    ("histogram", ({1: -1.0},), "counts must hold finite weights from 0"),
    ("histogram", ({1: float("nan")},), "counts must hold finite weights from 0"),
    ("histogram", ({1: 10**400},), "counts must hold finite weights from 0"),
    ("histogram", ({1: "many"},), "counts must hold finite weights from 0"),
    ("histogram", ({1: 1.0}, {1: 2.0}), "from 0 to theirs"),
    ("histogram", ({1: 1.0}, {2: 1.0}), "decode for some of these shapes"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), IMPOSSIBLE)
def test_impossible_traffic_is_refused(make: str, arguments: tuple[Any, ...], message: str) -> None:
    """By name and place."""
    with pytest.raises(ConfigError, match=message):
        getattr(Workload, f"from_{make}")(*arguments)
