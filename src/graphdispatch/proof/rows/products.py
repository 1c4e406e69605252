"""Rules of products: matrices, attention, convolutions and recurrent layers."""

from .calls import NO_ROWS, Call, Rule
from .labels import Label, lies_along_rows, plain_dim
from .rule_text import TextRule

_ATTENTION = TextRule("z h q* d*, z h k* d*, z h k* v*, + z h q k -> z h q v, z h q")
_SHARED_KEYS = TextRule("z h q* d*, z g* k* d*, z g* k* v*, + z h q k -> z h q v, z h q")


def attention(c: Call) -> list[Label]:
    """Scaled dot-product attention of (batch, heads, length, width); several heads may share a key."""
    heads = {c.a[name].shape[1] for name in ("query", "key", "value")}
    return (_ATTENTION if len(heads) == 1 else _SHARED_KEYS)(c)


def convolution(c: Call) -> list[Label]:
    """A convolution of (batch, channels, lengths)."""
    label, weight, out = c.certain_label("input"), c.a["weight"], c.outs[0]
    c.blend(label.dims[1:], "a convolution over rows")
    for tensor in c.tensors[1:]:
        c.blend(c.label(tensor).dims, NO_ROWS)
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


_WEIGHTS = ", _"
_LAYER = [TextRule(f"n s* w*{12 * _WEIGHTS}{mask} -> n s w") for mask in ("", ", n ...*")]
_HEADS = [TextRule(f"n q* w*, n k* x*, n k* y*{4 * _WEIGHTS}{mask} -> n q w, n q k") for mask in ("", ", n ...*")]


def fused_layer(c: Call) -> list[Label]:
    """A layer of an encoder, or its attention: (batch, length, width). A mask may have rows, too."""
    has_rows_in_mask = c.has("mask") and lies_along_rows(c.label("mask"))
    return (_HEADS if "key" in c.a else _LAYER)[has_rows_in_mask](c)


RULES: dict[Rule, str] = {
    TextRule("a k*, k* b -> a b"): "mm _int_mm",
    TextRule("+, a k*, k* b -> a b"): "addmm _addmm_activation",
    TextRule("z a k*, z k* b -> z a b"): "bmm",
    TextRule("+, z a k*, z k* b -> z a b"): "baddbmm",
    TextRule("a k*, k* -> a"): "mv",
    TextRule("+, a k*, k* -> a"): "addmv",
    TextRule("k*, k* -> "): "dot",
    TextRule("+, a, b -> a b"): "addr",
    attention: """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
        _scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable""",
    fused_layer: "_transformer_encoder_layer_fwd _native_multi_head_attention",
    convolution: "convolution _convolution",
    TextRule("s* n w*, _, _, _, _, ... n h*, ... n h* -> s n o, ... n h, ... n h, ?"): "mkldnn_rnn_layer",
}
