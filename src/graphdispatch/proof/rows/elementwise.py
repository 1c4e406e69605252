"""Rules of operators that work element by element, along a dimension, or on all elements of some dimensions."""

import torch

from .calls import Call, Rule
from .labels import Label
from .rule_text import TextRule

WIDE = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})
"""Types that hold each number of a row, or of a choice, as it is."""


def pointwise(c: Call) -> list[Label]:
    """Element by element of operands that broadcast."""
    return c.each(Label(c.broadcast([c.certain_label(tensor).dims for tensor in c.tensors])))


def keep(c: Call) -> list[Label]:
    """The same elements."""
    is_wide = all(one.dtype in WIDE for one in (c.first, *c.outs))
    label = c.label(c.first, is_data=not is_wide)
    return c.each(label if is_wide else label._replace(tag=None))


def reduction(c: Call) -> list[Label]:
    """All elements along some dimensions become one."""
    label = c.certain_label(c.first)
    reduced = c.places(c.a.get("dim"), len(label.dims))
    c.blend([label.dims[d] for d in reduced], "")
    kept = tuple(() if i in reduced else dim for i, dim in enumerate(label.dims))
    short = tuple(dim for i, dim in enumerate(label.dims) if i not in reduced)
    return [Label(kept if out.dim() == len(kept) else short) for out in c.outs]


def along(c: Call) -> list[Label]:
    """Elements along one dimension or several go into each other; its size may change."""
    dims = c.broadcast([c.certain_label(tensor).dims for tensor in c.tensors])
    places = c.places(c.a.get("dims", c.a.get("dim", -1)), len(dims)) if dims else []
    c.blend([dims[d] for d in places], "")
    return [
        Label(tuple(c.resized(dim, out.shape[i]) if i in places else dim for i, dim in enumerate(dims)))
        for out in c.outs
    ]


_NORMED = TextRule("... -> ..., ?, ?")


def layer_norm(c: Call) -> list[Label]:
    """Statistics of the last dimensions."""
    c.blend(c.certain_label(c.first).dims[-len(c.a["normalized_shape"]) :], "")
    return _NORMED(c)


_OF_STATE = TextRule("b c ..., + c, + c, + c, + c -> b c ..., ?, ?, ?")
_OF_BATCH = TextRule("b* c ...*, + c, + c, + c, + c -> b c ..., ?, ?, ?")


def batch_norm(c: Call) -> list[Label]:
    """Statistics of the state, or of the batch in training."""
    return (_OF_BATCH if c.a.get("training", "with_update" in c.name) else _OF_STATE)(c)


_LOSSES = TextRule("b c* ..., b ... -> b ..., ?")
_LOSS = TextRule("b* c* ...*, b* ...* -> , ?")


def nll_loss(c: Call) -> list[Label]:
    """A loss for each row, or of all."""
    return (_LOSS if c.a["reduction"] else _LOSSES)(c)


def loss(c: Call) -> list[Label]:
    """A loss for each pair of elements, or of all."""
    dims = c.broadcast([c.certain_label(tensor).dims for tensor in c.tensors])
    if c.a["reduction"]:
        c.blend(dims, "")
    return [Label(() if c.a["reduction"] else dims)]


RULES: dict[Rule, str] = {
    pointwise: "where masked_fill rsub polar complex hardswish copy",
    keep: "clone _to_copy lift_fresh lift_fresh_copy alias detach _conj _neg_view to",
    TextRule("... -> ..., ..."): """fill zero bucketize isin fake_quantize_per_tensor_affine_cachemask _prelu_kernel
        quantize_per_tensor dequantize native_dropout""",
    reduction: """sum mean prod amax amin min any all norm linalg_vector_norm var std var_mean std_mean logsumexp nansum
        count_nonzero median nanmedian mode kthvalue aminmax argmin""",
    along: """_softmax _log_softmax _safe_softmax glu cumprod cummax cummin logcumsumexp _fft_r2c _fft_c2c _fft_c2r
        flip roll linalg_cross""",
    TextRule("... a* -> ... a, ... a"): "upsample_nearest1d upsample_linear1d reflection_pad1d replication_pad1d",
    TextRule("... a* b* -> ... a b, ... a b"): """max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d
        adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d
        _upsample_bilinear2d_aa reflection_pad2d replication_pad2d tril triu linalg_matrix_exp""",
    TextRule("... a* b* -> ... a b, ?"): "linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex",
    TextRule("... a* b* -> ..., ..., ?, ?"): "_linalg_slogdet",
    TextRule("... a* b* -> ..., ?, ?"): "_linalg_det",
    TextRule("... a* b* -> ... a, ... a b"): "_linalg_eigh",
    TextRule("n c* h* w* -> n x* y*"): "im2col",
    TextRule("n x* y* -> n c* h* w*"): "col2im",
    TextRule("... a* b* c* -> ... a b c, ... a b c"): """max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d
        adaptive_max_pool3d upsample_trilinear3d pixel_shuffle pixel_unshuffle""",
    TextRule("n c* ... -> n c ..."): "channel_shuffle",
    TextRule("n ...* -> n ..., ?, ?"): "native_group_norm mkldnn_convolution",
    layer_norm: "native_layer_norm _fused_rms_norm",
    batch_norm: """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
        _batch_norm_with_update _batch_norm_no_update""",
    TextRule("z c* h* w*, z i* j* two* -> z c i j"): "grid_sampler_2d",
    TextRule("z c* h* w* d*, z i* j* k* three* -> z c i j k"): "grid_sampler_3d",
    TextRule("... p k*, ... r k* -> ... p r"): "_cdist_forward _euclidean_dist",
    nll_loss: "nll_loss_forward nll_loss2d_forward",
    loss: "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy_with_logits",
    TextRule("... s*, ... v -> ... v"): "searchsorted",  # among boundaries of its own row, or for all
}
