"""Rules of products: matrices, attention, convolutions and recurrent layers."""

from torch import Tensor

from .calls import Call
from .elementwise import Rule
from .labels import Label, MixError, UnknownError, fault_here, has_rows, own_size, plain_dim, plain_dims, row_place

_FACTORS = (
    *(("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2"), ("mat", "vec"), ("self", "vec"), ("self", "tensor")),
    ("input", "weight"),
)


def matmul(c: Call) -> list[Label]:
    """A product of two matrices, or of batches of them, and what is added."""
    one, other = next(pair for pair in _FACTORS if c.has(pair[0]) and c.has(pair[1]))
    left, right = c.certain_label(one).dims, c.certain_label(other).dims
    if other == "weight":
        right = right[::-1]
    inner = right[-2] if len(right) > 1 else right[-1]
    c.blend([left[-1], inner], "a product over rows")
    c.sizes.joined(left[-1], inner)
    batch = left[:-2]
    if len(left) == 3 and len(right) == 3:
        batch = (c.sizes.joined(left[0], right[0]),)
    dims = (*batch, *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))
    for tensor in c.tensors:
        if tensor is not c.a[one] and tensor is not c.a[other]:
            c.fit(dims, tensor)
    return [Label(dims)]


def outer(c: Call) -> list[Label]:
    """Each element of a vector by each of another, and what is added."""
    dims = (*c.certain_label("vec1").dims, *c.certain_label("vec2").dims)
    c.fit(dims, c.a["self"])
    return [Label(dims)]


def attention(c: Call) -> list[Label]:
    """Scaled dot-product attention of (batch, heads, length, width)."""
    query, key, value = (c.certain_label(name).dims for name in ("query", "key", "value"))
    c.blend([dim for dims in (query, key, value) for dim in dims[-2:]], "attention over rows")
    c.sizes.joined(key[-2], value[-2])
    batch = c.sizes.joined(c.sizes.joined(query[0], key[0]), value[0])
    if len(query) != 4 or own_size(query[1]) != own_size(key[1]) or own_size(key[1]) != own_size(value[1]):
        c.blend([dim for dims in (query, key, value) for dim in dims[1:-2]], "rows for heads")
        heads = query[1:-2]  # several of them share a key
    else:
        heads = (c.sizes.joined(c.sizes.joined(query[1], key[1]), value[1]),)
    mask = c.a.get("attn_mask" if "attn_mask" in c.a else "attn_bias")
    if isinstance(mask, Tensor):
        c.fit((batch, *heads, query[-2], key[-2]), mask)
    scores = Label((batch, *heads, query[-2]))
    rest = []
    for out in c.outs[1:]:
        is_scores = tuple(out.shape) == tuple(map(own_size, scores.dims))
        fault = fault_here(False, c.func._schema.name, "a further result") if out.dim() > 1 else None
        rest.append(scores if is_scores else Label(plain_dims(out.shape), fault, is_lost=fault is not None))
    return [Label((*scores.dims, value[-1])), *rest]


def convolution(c: Call) -> list[Label]:
    """A convolution of (batch, channels, lengths)."""
    label, weight, out = c.certain_label("input"), c.a["weight"], c.outs[0]
    c.blend_others(c.a["input"])
    c.blend(label.dims[1:], "a convolution over rows")
    dims = [label.dims[0], plain_dim(out.shape[1])]
    for place, old in enumerate(label.dims[2:]):
        stride, padding, dilation, more = (
            values[place if len(values) > 1 else 0]
            for values in (c.a["stride"], c.a["padding"], c.a["dilation"], c.a["output_padding"])
        )
        reach, sizes = dilation * (weight.shape[2 + place] - 1), c.sizes.values(old)
        if c.a["transposed"]:
            sizes = (sizes - 1) * stride - 2 * padding + reach + more + 1
        else:
            sizes = (sizes + 2 * padding - reach - 1) // stride + 1
        dims.append(c.computed(old, sizes, out.shape[2 + place]))
    return [Label(tuple(dims))]


def recurrent(c: Call) -> list[Label]:
    """A recurrent layer of (length, batch, width), with states of (layers, batch, width)."""
    dims = c.certain_label("input").dims
    c.blend([dims[0], dims[2]], "a recurrence over rows")
    row = dims[1]
    for tensor in c.tensors:
        label = c.certain_label(tensor)
        for place, dim in enumerate(label.dims):
            if has_rows(dim) and (place != len(label.dims) - 2 or dim != row):
                raise MixError("rows of a state")
    made = []
    for place, out in enumerate(c.outs):
        if out.dim() == 3 and place == 0:
            made.append(Label((dims[0], row, plain_dim(out.shape[2]))))
        elif out.dim() > 1 and out.shape[-2] == own_size(row):
            made.append(Label((*plain_dims(out.shape[:-2]), row, plain_dim(out.shape[-1]))))
        elif out.numel():
            raise UnknownError("a further result")
        else:
            made.append(Label(plain_dims(out.shape)))
    return made


def fused_layer(c: Call) -> list[Label]:
    """A layer of an encoder, or its attention: (batch, length, width)."""
    names = [name for name in ("src", "query", "key", "value") if name in c.a]
    first = c.certain_label(names[0]).dims
    for name in names:
        dims = c.certain_label(name).dims
        c.blend(dims[1:], "rows for time")
        c.sizes.joined(first[0], dims[0])
    followed = [c.a[name] for name in names]
    if c.has("mask"):
        mask = c.certain_label("mask").dims
        followed.append(c.a["mask"])
        if row_place(mask) not in (None, 0):
            raise MixError("rows of a mask")
        if row_place(mask) == 0:
            c.sizes.joined(first[0], mask[0])
    c.blend_others(*followed)
    last = c.certain_label("key").dims[1] if "key" in c.a else first[2]
    weights = [Label((*first[:2], last) if out.numel() else plain_dims(out.shape)) for out in c.outs[1:]]
    return [Label((*first[:2], c.resized(first[2], c.outs[0].shape[2]))), *weights]


RULES: dict[Rule, str] = {
    matmul: "mm bmm addmm baddbmm mv addmv dot _addmm_activation linear _int_mm",
    outer: "addr",
    attention: """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
        _scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math
        _scaled_dot_product_fused_attention_overrideable""",
    convolution: "convolution _convolution",
    recurrent: "mkldnn_rnn_layer",
    fused_layer: "_transformer_encoder_layer_fwd _native_multi_head_attention",
}
