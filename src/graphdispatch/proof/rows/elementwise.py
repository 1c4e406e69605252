"""Rules of operators that work element by element, along a dimension, or on all elements of some dimensions."""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .calls import Call
from .labels import Dim, Label, UnknownError, has_rows, own_size, plain_dim, plain_dims

Rule = Callable[[Call], list[Label]]

WIDE = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})
"""Types that hold each number of a row, or of a choice, as it is."""


def pointwise(c: Call) -> list[Label]:
    """Element by element of operands that broadcast."""
    return c.each(Label(c.broadcast(c.tensors)))


def of_first(c: Call) -> list[Label]:
    """Element by element of the first tensor; others have no rows."""
    c.blend_others(c.first)
    return c.each(Label(c.certain_label(c.first).dims))


def keep(c: Call) -> list[Label]:
    """The same elements."""
    label = c.label(c.first)
    is_exact = c.first.dtype in WIDE and all(out.dtype in WIDE for out in c.outs)
    if label.tag is None or is_exact:
        return c.each(label)
    return c.each(label._replace(tag=None, fault=label.fault or label.tag.fault))


def reduction(c: Call) -> list[Label]:
    """All elements along some dimensions become one."""
    if isinstance(c.a.get("other"), Tensor):
        return pointwise(c)
    label = c.certain_label(c.first)
    reduced = c.places(c.a.get("dim"), len(label.dims))
    c.blend([label.dims[d] for d in reduced], "")
    c.blend_others(c.first)
    kept = tuple(() if i in reduced else dim for i, dim in enumerate(label.dims))
    short = tuple(dim for i, dim in enumerate(label.dims) if i not in reduced)
    return [Label(kept if out.dim() == len(kept) else short) for out in c.outs]


def along(c: Call) -> list[Label]:
    """Elements along one dimension or several go into each other; its size may change."""
    label = c.certain_label(c.first)
    places = c.places(c.a.get("dim", -1), len(label.dims)) if label.dims else []
    c.blend([label.dims[d] for d in places], "")
    c.blend_others(c.first)
    return [
        Label(tuple(c.resized(dim, out.shape[i]) if i in places else dim for i, dim in enumerate(label.dims)))
        for out in c.outs
    ]


def _changed(c: Call, dims: Sequence[Dim], shape: Sequence[int]) -> Sequence[Dim]:
    """Dimensions within which an operator does anything, with their new sizes."""
    if len(dims) == len(shape):
        return [c.resized(dim, size) for dim, size in zip(dims, shape, strict=True)]
    c.sizes.lose(Label(tuple(dims)), "a size that no rule tells for other batches")
    return plain_dims(shape)


def within_last(count: int) -> Rule:
    """The rule of operators that do anything within the last ``count`` dimensions, and may change their sizes."""

    def rule(c: Call) -> list[Label]:
        label = c.certain_label(c.first)
        first = len(label.dims) - count
        if first < 0:
            raise UnknownError("fewer dimensions")
        c.blend(label.dims[first:], "")
        c.blend_others(c.first)
        return [Label((*label.dims[:first], *_changed(c, label.dims[first:], out.shape[first:]))) for out in c.outs]

    return rule


def within_planes(c: Call) -> list[Label]:
    """Pooling, padding and interpolation: the name says how many dimensions they work on."""
    found = re.search(r"(\d)d", c.name)
    assert found is not None
    return within_last(int(found[1]))(c)


def within_first(c: Call) -> list[Label]:
    """Anything within an entry of the first dimension."""
    label = c.certain_label(c.first)
    c.blend(label.dims[1:], "")
    c.blend_others(c.first)
    made = []
    for out in c.outs:
        if not out.dim() or out.shape[0] != own_size(label.dims[0]):
            raise UnknownError("a result for all rows")
        rest = [
            c.resized(label.dims[i], size) if i < len(label.dims) else plain_dim(size)
            for i, size in enumerate(out.shape[1:], 1)
        ]
        made.append(Label((label.dims[0], *rest)))
    return made


def layer_norm(c: Call) -> list[Label]:
    """Statistics of the last dimensions."""
    label = c.certain_label("input")
    first = len(label.dims) - len(c.a["normalized_shape"])
    c.blend(label.dims[first:], "")
    c.blend_others(c.a["input"])
    statistics = Label((*label.dims[:first], *[()] * (len(label.dims) - first)))
    return [Label(label.dims), *[statistics] * (len(c.outs) - 1)]


def batch_norm(c: Call) -> list[Label]:
    """Statistics of the state, or of the batch in training."""
    label = c.certain_label(c.first)
    if c.a.get("training", "with_update" in c.name):
        c.blend([dim for i, dim in enumerate(label.dims) if i != 1], "statistics of all rows")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if c.has(name):
            c.fit((label.dims[1],), c.a[name])
    channels = tuple(map(own_size, label.dims[1:2]))
    statistics = [
        Label(label.dims[1:2] if tuple(out.shape) == channels else plain_dims(out.shape)) for out in c.outs[1:]
    ]
    return [Label(label.dims), *statistics]


def copy(c: Call) -> list[Label]:
    """One tensor becomes the other."""
    return [Label(c.broadcast([c.a["self"], c.a["src"]]))]


def fill(c: Call) -> list[Label]:
    """All elements become a number."""
    c.blend_others(c.a["self"])
    return [Label(c.label("self").dims, c.label("self").fault, c.label("self").is_lost)]


def nll_loss(c: Call) -> list[Label]:
    """A loss for each row."""
    if c.a["reduction"] != 0:
        c.blend(c.certain_label("self").dims, "a loss of all rows")
    scores, target = c.certain_label("self"), c.certain_label("target")
    c.blend([scores.dims[1 if len(scores.dims) > 1 else 0]], "")
    c.blend_others(c.a["self"], c.a["target"])
    rest = (*scores.dims[:1], *scores.dims[2:]) if len(scores.dims) > 1 else ()
    for one, other in zip(rest, target.dims, strict=True):
        if has_rows(one) != has_rows(other):
            raise UnknownError("rows beside none")
        c.sizes.joined(one, other)
    return [Label(target.dims)]


def triangle(c: Call) -> list[Label]:
    """The upper or lower triangle of the last two dimensions."""
    label = c.certain_label(c.first)
    c.blend(label.dims[-2:], "a triangle of rows")
    return c.each(Label(label.dims))


def moved(c: Call) -> list[Label]:
    """Elements along some dimensions in another order."""
    label = c.certain_label(c.first)
    c.blend([label.dims[d] for d in c.places(c.a.get("dims"), len(label.dims))], "rows in another order")
    return c.each(Label(label.dims))


def bucketize(c: Call) -> list[Label]:
    """Each element among boundaries without rows."""
    c.blend_others(c.a["self"])
    return [Label(c.certain_label("self").dims)]


def searchsorted(c: Call) -> list[Label]:
    """Each element among boundaries without rows, or among those of its own row."""
    steps, label = c.certain_label("sorted_sequence").dims, c.certain_label("self").dims
    c.blend(steps[-1:], "rows as boundaries")
    c.blend_others(c.a["sorted_sequence"], c.a["self"])
    if len(steps) == 1:
        return [Label(label)]
    return [Label((*(c.sizes.joined(a, b) for a, b in zip(steps[:-1], label[:-1], strict=True)), label[-1]))]


def renorm(c: Call) -> list[Label]:
    """All that belongs to an entry of one dimension."""
    label = c.certain_label("self")
    at = c.place("dim", len(label.dims))
    c.blend([dim for i, dim in enumerate(label.dims) if i != at], "")
    return [Label(label.dims)]


def cross(c: Call) -> list[Label]:
    """Products of vectors, which lie along one dimension."""
    dims = c.broadcast([c.a["self"], c.a["other"]])
    c.blend([dims[c.place("dim", len(dims), -1)]], "")
    return [Label(dims)]


def grid_sample(c: Call) -> list[Label]:
    """Places of an image for each of (batch, heights, widths)."""
    image, grid = c.certain_label("input").dims, c.certain_label("grid").dims
    c.blend([*image[1:], *grid[1:]], "places over rows")
    return [Label((c.sizes.joined(image[0], grid[0]), image[1], *grid[1:-1]))]


def distance(c: Call) -> list[Label]:
    """Distances between the vectors of two tensors."""
    one, other = c.certain_label("x1"), c.certain_label("x2")
    c.blend([one.dims[-1], other.dims[-1]], "distances over rows")
    batch = [c.sizes.joined(a, b) for a, b in zip(one.dims[:-2], other.dims[:-2], strict=True)]
    return [Label((*batch, one.dims[-2], other.dims[-2]))]


RULES: dict[Rule, str] = {
    pointwise: """where masked_fill rsub isnan nan_to_num polar complex _conj_physical hardswish""",
    keep: "clone _to_copy lift_fresh lift_fresh_copy alias detach contiguous _conj _neg_view to",
    of_first: """fake_quantize_per_tensor_affine fake_quantize_per_tensor_affine_cachemask _prelu_kernel
        quantize_per_tensor dequantize native_dropout""",
    reduction: """sum mean prod amax amin min any all norm linalg_vector_norm var std var_mean std_mean logsumexp nansum
        count_nonzero median nanmedian mode kthvalue aminmax argmin""",
    along: """_softmax _log_softmax _safe_softmax glu cumprod cummax cummin logcumsumexp _fft_r2c _fft_c2c _fft_c2r""",
    within_planes: """max_pool2d_with_indices max_pool3d_with_indices max_pool1d avg_pool1d avg_pool2d avg_pool3d
        _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d
        upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d
        _upsample_nearest_exact2d _upsample_bilinear2d_aa reflection_pad1d reflection_pad2d replication_pad1d
        replication_pad2d""",
    within_last(3): "pixel_shuffle pixel_unshuffle channel_shuffle im2col",
    within_last(2): """linalg_inv_ex linalg_cholesky_ex _linalg_det _linalg_slogdet _linalg_eigh linalg_lu_factor_ex
        linalg_matrix_exp col2im""",
    within_first: "native_group_norm mkldnn_convolution thnn_conv2d",
    layer_norm: "native_layer_norm _fused_rms_norm rms_norm",
    batch_norm: """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
        _batch_norm_with_update _batch_norm_no_update""",
    copy: "copy",
    fill: "fill zero",
    nll_loss: "nll_loss_forward",
    triangle: "tril triu",
    moved: "flip roll",
    bucketize: "bucketize",
    searchsorted: "searchsorted",
    renorm: "renorm",
    cross: "linalg_cross",
    grid_sample: "grid_sampler_2d grid_sampler_3d",
    distance: "_cdist_forward _euclidean_dist",
}
PLACES: dict[Rule, tuple[str, ...]] = {keep: ("self", "input")}
