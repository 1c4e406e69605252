"""Rules of products: matrices, attention, convolutions and recurrent layers."""

from .calls import Call, Rule
from .labels import Label, lies_along_rows, own_size, plain_dim
from .rule_text import TextRule


def convolution(c: Call) -> list[Label]:
    """A convolution of (batch, channels, lengths)."""
    (rows, *others), out = c.certain_label("input").dims, c.outs[0].shape
    c.blend(others, "a convolution over rows")
    dims = [rows, plain_dim(out[1])]
    for place, old in enumerate(others[1:]):
        stride, padding, dilation = (
            values[place if len(values) > 1 else 0] for values in (c.a["stride"], c.a["padding"], c.a["dilation"])
        )
        lengths = c.sizes.values(old)
        if c.a["transposed"]:
            lengths = lengths * stride + (out[2 + place] - own_size(old) * stride)
        else:
            reach = dilation * (c.a["weight"].shape[2 + place] - 1)
            lengths = (lengths + 2 * padding - reach - 1) // stride + 1
        dims.append(c.sizes.dim_of_values(lengths))
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
    # of (batch, heads, length, width), where several heads may share a key
    TextRule("z h q* d*, z g* k* d*, z g* k* v*, + z h q k -> z h q v, z h q"): """
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
        _scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable""",
    convolution: "convolution _convolution",
    fused_layer: "_transformer_encoder_layer_fwd _native_multi_head_attention",
    TextRule("s* n w*, _, _, _, _, ... n h*, ... n h* -> s n o, ... n h, ... n h, ?"): "mkldnn_rnn_layer",
}
