"""The table of decisions, over random capture sizes."""

from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode, Reason
from graphdispatch.decide.decision import SizeTable
from graphdispatch.engines import CUDAGraphConfig
from graphdispatch.sizes import NAMED_SIZES

_SIZES = st.one_of(
    st.sets(st.integers(1, 300), min_size=1, max_size=20).map(lambda sizes: tuple(sorted(sizes))),
    st.sampled_from(["auto", *NAMED_SIZES]),
)


def _table(sizes: str | tuple[int, ...], largest: int, *, pads: bool = True) -> SizeTable:
    config = CUDAGraphConfig(capture_sizes=sizes, max_batch_size=largest)
    resolved = config.resolve()
    return SizeTable(resolved.sizes, CUDAGraphMode.FULL, pad_batches=pads)


@given(sizes=_SIZES, largest=st.integers(300, 400))
def test_smallest_size_that_fits(sizes: str | tuple[int, ...], largest: int) -> None:
    """Every number of rows up to the largest size goes to the smallest size that holds it, and says if it is padded."""
    table = _table(sizes, largest)
    for rows in range(1, table.largest + 1):
        decision = table.decide(rows)
        assert decision.size == min(size for size in table.sizes if size >= rows)
        assert decision.descriptor is not None
        assert decision.descriptor.num_tokens == decision.size
        assert decision.reason is (Reason.EXACT if decision.size == rows else Reason.PADDED)


@given(sizes=_SIZES, largest=st.integers(300, 400))
def test_no_rows_and_too_many_are_eager(sizes: str | tuple[int, ...], largest: int) -> None:
    """Nothing below one row or above the largest size gets a graph."""
    table = _table(sizes, largest)
    assert table.decide(0).reason is Reason.NO_ROWS
    for rows in (table.largest + 1, table.largest + 100):
        assert table.decide(rows).mode is CUDAGraphMode.NONE
        assert table.decide(rows).reason is Reason.ABOVE_LARGEST_SIZE


@given(sizes=_SIZES, largest=st.integers(300, 400))
def test_each_row_count_is_served_once(sizes: str | tuple[int, ...], largest: int) -> None:
    """What the sizes serve are the numbers from one to the largest, each once."""
    table = _table(sizes, largest)
    served = [rows for size in table.sizes for rows in table.served_by(size)]
    assert served == list(range(1, table.largest + 1))


@given(sizes=_SIZES, largest=st.integers(300, 400))
def test_without_padding_only_exact_sizes(sizes: str | tuple[int, ...], largest: int) -> None:
    """With ``pad_batches=False`` a graph serves exactly its own size."""
    table = _table(sizes, largest, pads=False)
    graphed = [rows for rows in range(table.largest + 2) if table.decide(rows).mode.has_graphs()]
    assert graphed == list(table.sizes)
