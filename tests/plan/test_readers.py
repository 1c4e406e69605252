"""Files of traffic: every format gives the same steps, and every fault is named with its file, line and field."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from graphdispatch.errors import ConfigError
from graphdispatch.plan import Steps, Workload
from graphdispatch.plan.readers import read_requests, read_trace
from graphdispatch.plan.scheduler import SchedulerModel

CSV = """step,t_ms,num_tokens,num_reqs,uniform_decode
0,0.00,40,1,0
1,9.20,1,1,1
2,17.23,3,3,1
"""
JSONL = "".join(
    json.dumps({"num_tokens": n, "num_reqs": r, "uniform_decode": u}) + "\n"
    for n, r, u in [(40, 1, 0), (1, 1, 1), (3, 3, 1)]
)
LOG = """INFO 01-02 10:00:00 [cuda_graph.py:99] **CUDAGraph Config Settings:**
INFO 01-02 10:00:00 [cuda_graph.py:99] - Mode: FULL_AND_PIECEWISE
INFO 01-02 10:00:00 [cuda_graph.py:99] **CUDAGraph Stats:**
| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode            | Count |
|-----------------|---------------|--------------|-------------------------|-------|
| 3               | 4             | 1            | CUDAGraphMode.FULL      | 12    |
| 30              | 32            | 2            | CUDAGraphMode.PIECEWISE | 2     |

INFO 01-02 10:00:10 [loggers.py:1] 7 | 8 | unrelated | line
(APIServer pid=1) INFO [cuda_graph.py:99] | Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
(APIServer pid=1) INFO [cuda_graph.py:99] | --------------- | ------------- | ------------ | ------------ | ----- |
(APIServer pid=1) INFO [cuda_graph.py:99] | 3               | 4             | 1            | FULL         | 5     |
(APIServer pid=1) INFO [cuda_graph.py:99] | 900             | 900           | 0            | NONE         | 1     |
"""


def put(folder: Path, content: str | bytes, name: str = "trace") -> Path:
    """A file of this content."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    "content",
    [
        CSV,
        CSV.replace("\n", "\r\n"),
        "\ufeff" + CSV,
        gzip.compress(CSV.encode()),
        CSV.replace(",1\n", ",True\n").replace(",0\n", ",False\n"),
        CSV.replace("\n1,", "\n\n1,"),
        JSONL,
        gzip.compress(JSONL.encode()),
        JSONL.replace('"uniform_decode": 1', '"is_x": 0, "uniform_decode": true') + "\n",
    ],
    ids=["csv", "crlf", "bom", "csv-gz", "words", "empty-line", "jsonl", "jsonl-gz", "other-columns"],
)
def test_every_format_gives_the_same_steps(content: str | bytes, tmp_path: Path) -> None:
    """What a file holds decides how it is read, not what it is called."""
    steps = read_trace(put(tmp_path, content))
    assert isinstance(steps, Steps)
    assert [None if column is None else column.tolist() for column in steps] == [
        [40, 1, 3],
        [False, True, True],
        [1, 1, 3],
    ]


def test_parquet_is_read_where_pyarrow_is_installed(tmp_path: Path) -> None:
    """Integers and booleans come as they are; nulls and other types are faults of a row and a column."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "trace.parquet"
    parquet.write_table(pyarrow.table({"num_tokens": [40, 1], "uniform_decode": [False, True]}), path)
    steps = read_trace(path)
    assert isinstance(steps, Steps)
    assert (steps.num_tokens.tolist(), steps.is_decode.tolist()) == ([40, 1], [False, True])
    for column, where in (([4, None], "row 1"), ([4.5, 1.0], "row 0"), ([4, -1], "row 1")):
        parquet.write_table(pyarrow.table({"num_tokens": column}), path)
        with pytest.raises(ConfigError, match=rf"trace\.parquet, {where}, column num_tokens: expected an integer"):
            read_trace(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow: pip install 'graphdispatch\[parquet\]'"):
        read_trace(put(tmp_path, b"PAR1xxxx"))


def test_the_kind_of_a_step_follows_from_its_requests(tmp_path: Path) -> None:
    """Without a column for it, a step is uniform decode if it has a token for each request, or if nothing is known."""
    assert Workload.from_trace(put(tmp_path, "num_tokens,num_reqs\n4,4\n4,2\n")).decode.tolist() == [1.0]
    assert Workload.from_trace(put(tmp_path, "num_tokens\n4\n4\n")).decode.tolist() == [2.0]


def test_vllms_metrics_log_is_a_histogram(tmp_path: Path) -> None:
    """Tables add up, with and without a prefix; what ran FULL is uniform decode."""
    workload = Workload.from_trace(put(tmp_path, LOG))
    assert workload.sizes.tolist() == [3, 30, 900]
    assert (workload.decode.tolist(), workload.mixed.tolist()) == ([17, 0, 0], [0, 2, 1])
    assert workload.steps is None


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("num_tokens,num_reqs\n", "has no rows below its line of names"),
        ("tokens\n3\n", r"lacks the column\(s\) num_tokens; it has tokens"),
        ("num_tokens,uniform_decode\n3,1\n\n-3,1\n", "line 4, column num_tokens: expected an integer .*got '-3'"),
        ("num_tokens\n3\nnan\n", "line 3, column num_tokens: .*got 'nan'"),
        ("num_tokens\n1.0\n", "line 2, column num_tokens: .*got '1.0'"),
        ("num_tokens\n" + "9" * 5000 + "\n", "line 2, column num_tokens: .*got '9{40}'"),
        ("num_tokens\n1048577\n", "line 2, column num_tokens"),
        ("num_tokens,uniform_decode\n3,2\n", "line 2, column uniform_decode: expected 0 or 1, got '2'"),
        ("a,num_tokens\n1,2\n1\n", "line 3, column num_tokens: the value is missing"),
        ("num_tokens,num_reqs\n3,4\n", r"num_reqs\[0\] must be at most num_tokens=3"),
        (b"\xff\xfe\x00\x01", "is neither text nor Parquet"),
        (gzip.compress(CSV.encode())[:40], "cannot be read: Compressed file ended before"),
        (b"\x1f\x8b" + b"x" * 30, "cannot be read"),
        (gzip.compress(CSV.encode())[:-8] + b"\0" * 8, "cannot be read: CRC check failed"),
        ('{"num_tokens": 3}\n{"num_tokens": 3', "line 2: not JSON"),
        ('{"num_tokens": 3}\n[1]\n', "line 2: expected a JSON object, got list"),
        ('{"num_tokens": 3}\n\n{"num": 3}\n', "line 3, column num_tokens: the value is missing"),
        ('{"num_tokens": NaN}\n', "line 1, column num_tokens: .*got 'nan'"),
        ('{"num_tokens": true}\n', "line 1, column num_tokens: .*got 'True'"),
        ('{"num_tokens": "3"}\n', "line 1, column num_tokens"),
        ('{"num_tokens": ' + "9" * 5000 + "}\n", "line 1: not JSON"),
        ('{"num_tokens": ' + "9" * 50 + "}\n", "line 1, column num_tokens"),
        ('{"a": ' + "[" * 100_000 + "\n", "line 1: not JSON"),
        (LOG.replace("| 12 ", "| -2 "), "line 6, column Count: expected an integer from 1 to 2147483648, got '-2'"),
        (LOG.replace("| 1  ", "| 7  ", 1), "line 6: expected Padded Tokens"),
        ("\n".join(LOG.splitlines()[:5]), "has no rows in its tables"),
    ],
)
def test_a_bad_trace_is_refused_where_it_is_bad(content: str | bytes, match: str, tmp_path: Path) -> None:
    """One error, that names the file and, wherever there is one, the line and the column."""
    path = put(tmp_path, content)
    with pytest.raises(ConfigError, match=f"trace.*{match}"):
        Workload.from_trace(path)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    """A file that is not there is no empty trace."""
    with pytest.raises(ConfigError, match=r"absent\.csv cannot be read"):
        Workload.from_trace(tmp_path / "absent.csv")


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
REQUESTS = {
    "own": "arrival_s,prompt_tokens,output_tokens\n2.5,30,2\n0.5,20,3\n",
    "own, milliseconds": '{"arrival_ms": 2500, "prompt_tokens": 30, "output_tokens": 2}\n'
    '{"arrival_ms": 500.0, "prompt_tokens": 20, "output_tokens": 3}\n',
    "Mooncake": '{"timestamp": 2500, "input_length": 30, "output_length": 2, "hash_ids": [1]}\n'
    '{"timestamp": 500, "input_length": 20, "output_length": 3, "hash_ids": []}\n',
    "Azure": AZURE + "2023-11-16 18:17:05.5000000,30,2\n2023-11-16 18:17:03.5000000,20,3\n",
    "Azure, with a zone": AZURE + "2024-05-10 00:00:02.500+00:00,30,2\n2024-05-10 00:00:00.500+00:00,20,3\n",
}


@pytest.mark.parametrize("name", REQUESTS)
def test_request_traces_are_read_by_arrival(name: str, tmp_path: Path) -> None:
    """Whatever the unit of their arrivals, requests are sorted and the first comes at 0 ms."""
    arrival, prompt, output = read_requests(put(tmp_path, REQUESTS[name]))
    np.testing.assert_allclose(arrival, [0.0, 2000.0])
    assert (prompt.tolist(), output.tolist()) == ([20, 30], [3, 2])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("prompt_tokens,output_tokens\n1,1\n", "lacks a column of arrivals"),
        ("arrival_s,prompt_tokens\n1,1\n", r"lacks the column\(s\) output_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n1,1,1\nsoon,1,1\n", "line 3, .*: expected a number, got 'soon'"),
        ("arrival_s,prompt_tokens,output_tokens\ninf,1,1\n", "line 2, column arrival_s: expected a number"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n17,1,1\nx,1,1\n", "line 3, column TIMESTAMP: expected a date"),
        ("arrival_s,prompt_tokens,output_tokens\n1,0,1\n", "line 2, column prompt_tokens: expected an integer from 1"),
    ],
)
def test_bad_requests_are_refused_where_they_are_bad(content: str, match: str, tmp_path: Path) -> None:
    """As for steps: file, line, column."""
    with pytest.raises(ConfigError, match=f"trace.*{match}"):
        read_requests(put(tmp_path, content))


def test_requests_become_steps_by_the_scheduler_given(tmp_path: Path) -> None:
    """A workload of requests is that of the steps into which they are batched."""
    path = put(tmp_path, REQUESTS["own"])
    workload = Workload.from_requests(path, SchedulerModel(max_num_seqs=4, max_num_batched_tokens=16))
    assert workload.steps is not None
    assert workload.steps.num_tokens.tolist() == [16, 4, 1, 1, 16, 14, 1]
