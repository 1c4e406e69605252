"""Stand-ins while a thread is recorded: host reads past the dispatcher are refused, and torch says that it captures."""

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphdispatch import Reason, graphed
from graphdispatch.backends import get_backend
from graphdispatch.errors import CaptureError

from ..helpers import check_rows, in_threads

from_name = torch.cuda.is_current_stream_capturing
"""The function as code has it that imported it by name."""


def says_capturing() -> bool:
    """The answer of torch, as a library asks for it; a torch without CUDA raises while nobody records."""
    try:
        return bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError:
        return False


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "forced": lambda x: x.numpy(force=True),
    "asarray": np.asarray,
    "tolist": lambda x: x.tolist(),
    "data_ptr": lambda x: x.data_ptr(),
    "dlpack": np.from_dlpack,
    "to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "by class": lambda x: list(map(torch.Tensor.tolist, [x])),
    "storage": lambda x: x.untyped_storage()[0],
    "packed": lambda x: nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([2]), batch_first=True),
    "split": lambda x: x.tensor_split(torch.tensor([1, 2])),
    "split by keyword": lambda x: torch.tensor_split(x, tensor_indices_or_sections=torch.tensor([1, 2])),
    "equal": lambda x: torch.equal(x, x),
    "tensor": lambda x: torch.tensor([x[0, 0], 1.0]),
    "nested list": lambda x: torch.tensor([[1.0], [x[0, 0]]]),
    "list of a tensor": lambda x: torch.tensor(list(x[0])),
    "integers": lambda x: torch.tensor([x.long()[0, 0], 1]),
    "booleans": lambda x: torch.tensor([x.bool()[0, 0], True]),
    "complex": lambda x: torch.tensor([x.to(torch.complex64)[0, 0], 1]),
    "as_tensor": lambda x: torch.as_tensor([x[0, 0], 1.0]),
    "asarray of a list": lambda x: torch.asarray([x[0, 0], 1.0]),
    "new_tensor": lambda x: x.new_tensor([x[0, 0], 1.0]),
    "new": lambda x: x.new([x[0, 0], 1.0]),
    "Tensor": lambda x: torch.Tensor([x[0, 0], 1.0]),
    "FloatTensor": lambda x: torch.FloatTensor([x[0, 0], 1.0]),
    "tensor, by name": lambda x: tensor_by_name([x[0, 0], 1.0]),
    "index": lambda x: x[:, [x.long()[0, 0], 0]],
    "index that writes": lambda x: x.clone().__setitem__((slice(None), [x.long()[0, 0], 0]), 2.0),
    "pickle": pickle.dumps,
    "save": lambda x: torch.save(x, io.BytesIO()),
    "old save": lambda x: torch.save(x, io.BytesIO(), _use_new_zipfile_serialization=False),
    "storage's data_ptr": lambda x: x.untyped_storage().data_ptr(),
    "str": str,
    "str of one number": lambda x: str(x[0, 0]),
    "text": lambda x: f"{x}",
    "parameter": lambda x: repr(nn.Parameter(x[0, 0])),
}
NO_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numbers": lambda x: torch.tensor([[1.0, 2.0], [3, 4]]),
    "a tensor alone": lambda x: torch.tensor(x.detach()),
    "stack": lambda x: torch.stack([x[0, 0], x[0, 1]]),
    "index of numbers": lambda x: x[:, [0, 1]],
    "copy": copy.copy,
    "deepcopy": lambda x: copy.deepcopy([x]),
    "clone of a storage": lambda x: x.untyped_storage().clone(),
    "text of a shape": lambda x: f"{x.shape}, {x.dtype}, {nn.Linear(2, 2)}",
    "text of no data": lambda x: str(torch.empty(2, device="meta")),
    "pickle of numbers": lambda x: pickle.dumps([1.0, torch.float32, x.shape]),
}
"""What looks alike and reads nothing on the host."""
tensor_by_name = torch.tensor


def _record(fn: Callable[[], Any]) -> None:
    backend = get_backend("cpu")
    capture = backend.begin_capture(backend.make_pool())
    try:
        fn()
    finally:
        capture.abort()


@pytest.mark.parametrize("read", READS)
def test_host_reads_are_refused(read: str) -> None:
    """Whatever gives memory to the host is refused while a graph is recorded, and works before and after."""
    x = torch.ones(4, 3)
    READS[read](x)
    with pytest.raises(CaptureError, match=r"host|shape"):
        _record(lambda: READS[read](x))
    READS[read](x)


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", NO_READS)
def test_what_reads_nothing_is_recorded(name: str) -> None:
    """Numbers and whole tensors go on being recorded."""
    _record(lambda: NO_READS[name](torch.ones(4, 3)))


def test_nothing_stays_patched() -> None:
    """Torch has its own functions when nobody records: also after a recording that failed."""

    def own() -> list[Any]:
        names = ("numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "tensor_split", "__float__", "__index__")
        of_modules = [torch.cuda.graphs._cuda_isCurrentStreamCapturing, torch._tensor_str._str]
        return [vars(torch.Tensor).get(name) for name in names] + of_modules

    before = own()
    with pytest.raises(CaptureError):
        _record(lambda: torch.ones(2).tolist())
    assert all(now is then for now, then in zip(own(), before, strict=True))


def test_only_the_recording_thread_captures() -> None:
    """Torch says that it captures on the recording thread alone; another one may also read what it likes."""
    answers: list[tuple[bool, list[float]]] = []

    def recorded() -> None:
        assert torch.cuda.is_current_stream_capturing()
        assert from_name()
        answers.extend(in_threads(lambda: (says_capturing(), torch.ones(2).tolist())))

    _record(recorded)
    assert answers == [(False, [1.0, 1.0])]
    assert not says_capturing()


def test_paths_that_differ_are_refused() -> None:
    """A callable that computes something else while torch captures is refused: its answers are eager's."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x * (3 if says_capturing() else 2)

    served = graphed(model, dynamic={"x": 0}, sizes=[4])
    check_rows(served, *[4] * 6)
    assert served.stats.reasons[Reason.VERIFICATION_FAILED]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_mask_that_eager_reads_is_refused() -> None:
    """A ``TransformerEncoder`` with a padding mask reads it in eager: refused, with the remedy, and never wrong."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).eval()
    served = graphed(model, dynamic={"src": 0, "src_key_padding_mask": 0}, sizes=[4])
    for step in range(24):
        x, mask = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
        mask[:, 3:] = step > 20
        torch.testing.assert_close(served(x, src_key_padding_mask=mask), model(x, src_key_padding_mask=mask))
    assert set(served.stats.reasons) == {Reason.FIRST_SIGHTING, Reason.CAPTURE_UNSAFE}
    assert "enable_nested_tensor=False" in served.explain(x, src_key_padding_mask=mask)


FROM_SHAPES = """
    _batch_norm_impl_index _cudnn_attention_forward _debug_has_internal_overlap _dimI _dimV
    _efficient_attention_forward _fused_sdp_choice _has_compatible_shallow_copy_type _has_same_storage_numel
    _is_zerotensor _nested_get_ragged_idx _nnpack_available _nnz _scaled_dot_product_cudnn_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_fused_attention_overrideable _use_cudnn_ctc_loss
    _use_cudnn_rnn_flatten_weight _use_miopen_ctc_loss _version can_cast cudnn_is_acceptable dense_dim dim
    get_device is_coalesced is_complex is_conj is_contiguous is_distributed is_floating_point is_inference
    is_leaf is_neg is_pinned is_same_size is_set_to is_signed is_vulkan_available numel output_nr promote_types
    q_per_channel_axis q_scale q_zero_point qscheme result_type retains_grad size sparse_dim storage_offset
    stride sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride
"""
"""Operators that tell the host what it knows without reading any element: how a tensor lies in memory, its type, what
follows from shapes (an attention's longest lengths)."""
NAMED = "_nested_tensor_from_mask_left_aligned"
"""It is refused by its name."""
ALGORITHM = "_cslt_sparse_mm_search"
"""It takes a compressed sparse tensor, and measures kernels."""


PLAIN = {"bool", "complex", "float", "int", "number", "str"}
TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def plain_results() -> Iterator[str]:
    """The names of torch's operators that take a tensor, return a plain value, and have no tag that says so.

    Those that are made of others on every device arrive as these.
    """
    composite = set(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace != "aten" or full in composite:
            continue
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        takes, gives = (
            set(re.findall(r"\w+", " ".join(str(one.type) for one in part)))
            for part in (func._schema.arguments, func._schema.returns)
        )
        if "Tensor" in takes and gives & PLAIN and not TAGS & set(func.tags):
            yield packet


def test_torchs_own_results_for_the_host_have_tags() -> None:
    """All of torch's operators do that give the host more than shapes and types tell."""
    assert set(plain_results()) - {*FROM_SHAPES.split(), NAMED, ALGORITHM} == set()


def test_results_for_the_host_are_refused_by_schema() -> None:
    """An operator that takes a tensor and returns a plain value is refused, also one of somebody else."""
    library = torch.library.Library("host_reads_test", "FRAGMENT")
    library.define("peek(Tensor x) -> int")
    library.define("settings(int x) -> int")
    library.impl("peek", lambda x: int(x.sum()), "CompositeExplicitAutograd")
    library.impl("settings", lambda x: x, "CompositeExplicitAutograd")
    operators, x = torch.ops.host_reads_test, torch.ones(2, 2)
    for allowed in (
        lambda: operators.settings(1),
        lambda: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),  # which asks for a kernel
    ):
        _record(allowed)
    with pytest.raises(CaptureError, match="peek"):
        _record(lambda: operators.peek(x))
    with pytest.raises(CaptureError, match="_nested_tensor_from_mask_left_aligned"):
        _record(lambda: torch._nested_tensor_from_mask_left_aligned(x, x.bool()))
