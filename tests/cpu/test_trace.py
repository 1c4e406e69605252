"""The demo's traces: read from files, generated, and played as rows of a decoder's step."""

import gzip
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch.demo import Step, StepMaker, chunk_lengths, generate_trace, read_trace, slots_needed
from graphdispatch.errors import ConfigError

HEADER = "step,num_tokens,num_reqs,max_query_len,max_seq_len,uniform_decode,num_prefill_reqs,num_waiting"
LINES = [HEADER, "0,7,1,7,7,0,1,0", "1,1,1,1,8,1,0,0", "2,6,2,5,9,0,1,3"]
STEPS = [Step(7, 1, 7, 7, False, 1), Step(1, 1, 1, 8, True, 0), Step(6, 2, 5, 9, False, 1)]


def write(path: Path, lines: list[str]) -> Path:
    """The lines in a file, compressed if its name says so."""
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_a_file_is_read_plain_or_compressed(tmp_path: Path, name: str) -> None:
    """Both forms give the same steps, and columns that the demo does not use are ignored."""
    assert read_trace(write(tmp_path / name, LINES)) == STEPS


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    """The order of the columns does not matter."""
    turned = [",".join(reversed(line.split(","))) for line in LINES]
    assert read_trace(write(tmp_path / "t.csv", turned)) == STEPS


def test_limit_reads_no_further(tmp_path: Path) -> None:
    """Lines after the limit are not looked at, so that a fault there does not matter."""
    assert read_trace(write(tmp_path / "t.csv", [*LINES[:3], "x"]), limit=2) == STEPS[:2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,x,1,1,8,1,0,0", r"t\.csv, line 3, column num_tokens: expected an integer .* got 'x'"),
        ("1,-1,1,1,8,1,0,0", "line 3, column num_tokens: expected an integer"),
        (
            "1," + "9" * 5000 + ",1,1,8,1,0,0",
            r"line 3, column num_tokens: expected an integer from 1 to 1048576, got '9{40}'",
        ),
        ("1,1,1", "line 3, column max_query_len: the value is missing"),
        ("1,1,0,1,8,1,0,0", "column num_reqs: expected an integer from 1 to .* got '0'"),
        ("1,2,3,1,8,0,0,0", "column num_tokens: expected at least num_reqs=3, got 2"),
        ("1,9,3,7,8,0,4,0", "column num_prefill_reqs: expected at most num_reqs=3, got 4"),
        ("1,9,3,7,8,1,1,0", "column uniform_decode: expected 0 for 9 tokens of 3 requests, got 1"),
        ("1,3,3,1,8,2,0,0", "column uniform_decode: expected 0 or 1, got '2'"),
        ("1,9,3,7,8,0,0,0", "column num_prefill_reqs: expected at least 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    """A fault names file, line and column, what was expected and what stands there."""
    path = write(tmp_path / "t.csv", [*LINES[:2], line])
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    """All columns that are not there are listed."""
    path = write(tmp_path / "t.csv", ["num_tokens,num_reqs,max_seq_len,uniform_decode", "1,1,1,1"])
    with pytest.raises(ConfigError, match=r"lacks the column\(s\) max_query_len, num_prefill_reqs"):
        read_trace(path)


@pytest.mark.parametrize(("lines", "message"), [([], "is empty"), ([HEADER], "has no steps")])
def test_an_empty_file_is_an_error(tmp_path: Path, lines: list[str], message: str) -> None:
    """A file without a line, or with only its header, has nothing to run."""
    path = write(tmp_path / "t.csv", lines)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"a" * 5000)[:-20], gzip.compress(bytes(range(256)) * 9)[:30] + b"\xff" * 90],
    ids=["cut", "corrupt"],
)
def test_a_damaged_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    """Damage to the compression is reported with the file's name, like any other fault."""
    path = tmp_path / "t.csv.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"t\.csv\.gz cannot be read"):
        read_trace(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """A path that leads nowhere is named."""
    with pytest.raises(ConfigError, match=r"none\.csv cannot be read: .*No such file"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(("arguments", "name"), [((0,), "num_steps"), ((1, 0), "max_num_reqs")])
def test_generating_nothing_is_an_error(arguments: tuple[int, ...], name: str) -> None:
    """A trace has at least one step and one request."""
    with pytest.raises(ConfigError, match=f"{name} must be >= 1, got 0"):
        generate_trace(*arguments)


def test_a_generated_trace_is_seeded() -> None:
    """The same seed gives the same trace and another seed another one."""
    assert generate_trace(50, seed=3) == generate_trace(50, seed=3) != generate_trace(50, seed=4)


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 99))
def test_a_generated_trace_is_a_valid_file(
    tmp_path_factory: pytest.TempPathFactory, count: int, reqs: int, seed: int
) -> None:
    """Every generated step passes the checks of a file, and no step has more requests than allowed."""
    steps = generate_trace(count, reqs, seed)
    lines = [",".join(Step._fields), *(",".join(str(int(value)) for value in step) for step in steps)]
    assert read_trace(write(tmp_path_factory.mktemp("trace") / "t.csv", lines)) == steps
    assert len(steps) == count
    assert max(step.num_reqs for step in steps) <= reqs


@st.composite
def a_step(draw: st.DrawFn) -> Step:
    """Any step that a trace may hold, its longest chunk right or not."""
    decodes = draw(st.integers(0, 6))
    prefills = draw(st.integers(0 if decodes else 1, 4))
    chunked = prefills + draw(st.integers(0, 150)) if prefills else 0
    reqs, tokens = decodes + prefills, decodes + chunked
    return Step(tokens, reqs, draw(st.integers(1, 170)), 1, tokens == reqs, prefills)


some_steps = st.lists(a_step(), min_size=1, max_size=12)
windows = st.integers(1, 40)


@given(a_step())
def test_chunks_share_the_prefill_tokens(step: Step) -> None:
    """Each request in its prompt has at least one token, and together they have what the decodes leave."""
    lengths = chunk_lengths(step)
    assert len(lengths) == step.num_prefill_reqs
    assert min(lengths, default=1) >= 1
    assert sum(lengths) == step.num_tokens - (step.num_reqs - step.num_prefill_reqs)


def test_the_longest_chunk_is_the_trace_s() -> None:
    """The first chunk has max_query_len tokens, and the others share the rest evenly."""
    assert chunk_lengths(Step(103, 6, 50, 50, False, 4)) == [50, 17, 17, 17]


@given(some_steps, windows)
def test_rows_are_distinct_places(steps: list[Step], window: int) -> None:
    """A step has exactly num_tokens rows, on distinct places within the window, none on the scratch slot."""
    slots = slots_needed(steps, window)
    maker = StepMaker(slots, window, vocab=9)
    for step in steps:
        made = maker.make(step)
        places = set(zip(made.slots.tolist(), made.positions.tolist(), strict=True))
        assert len(places) == step.num_tokens == len(made.token_ids)
        assert all(0 <= slot < slots and 0 <= position < window for slot, position in places)
        assert all(t.dtype == torch.int64 for t in made)
        assert bool(((made.token_ids >= 0) & (made.token_ids < 9)).all())


@given(some_steps, windows)
def test_a_row_reads_only_what_its_own_sequence_wrote(steps: list[Step], window: int) -> None:
    """Whatever position a slot is at, all earlier ones were written since it last began at 0."""
    maker = StepMaker(slots_needed(steps, window), window, vocab=9)
    reached: dict[int, int] = {}
    for step in steps:
        made = maker.make(step)
        for slot, position in zip(made.slots.tolist(), made.positions.tolist(), strict=True):
            assert position in (0, reached.get(slot, -1) + 1)
            reached[slot] = position


@given(some_steps, windows)
def test_no_slot_is_superfluous(steps: list[Step], window: int) -> None:
    """slots_needed is tight: some step does occupy that many slots."""
    maker = StepMaker(slots_needed(steps, window), window, vocab=9)
    assert max(made.slots.unique().numel() for made in map(maker.make, steps)) == slots_needed(steps, window)


def test_a_decode_advances_and_wraps() -> None:
    """A request goes on where it was, and begins anew once its window is full."""
    maker = StepMaker(1, window=3, vocab=9)
    prompt = maker.make(Step(2, 1, 2, 2, False, 1))
    decodes = [maker.make(Step(1, 1, 1, 3, True, 0)).positions.item() for _ in range(3)]
    assert (prompt.positions.tolist(), decodes) == ([0, 1], [2, 0, 1])


def test_a_prompt_longer_than_the_window_lies_in_pieces() -> None:
    """The pieces stand on slots of their own; the request goes on from the last one, the others are free again."""
    maker = StepMaker(3, window=4, vocab=9)
    prompt = maker.make(Step(10, 1, 10, 10, False, 1))
    assert prompt.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert prompt.slots.unique().numel() == 3
    decode = maker.make(Step(3, 3, 1, 11, True, 0))
    assert decode.slots[0] == prompt.slots[-1]
    assert decode.positions.tolist() == [2, 0, 0]
