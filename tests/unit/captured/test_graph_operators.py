"""Work of single operators of a graph, against numbers worked out by hand."""

import pytest

from steptime.captured.cost import work_of
from steptime.captured.graph import Nodes, TensorType
from steptime.captured.ops import OPERATORS, ROWS


def node(op, inputs, outputs, **attributes):
    """A node from shapes; an input is (dtype, shape) or a list of those."""
    nodes = Nodes()

    def value(name, number, given):
        dtype, shape, *strides = given
        return nodes.source("input", f"{name}{number}", TensorType(shape, dtype, *strides))

    named = {
        name: [value(name, i, g) for i, g in enumerate(given)] if isinstance(given, list) else value(name, 0, given)
        for name, given in inputs.items()
    }
    return nodes.apply(op, named, attributes, outputs=[TensorType(shape, dtype) for dtype, shape in outputs])


def test_product_counts_2mnk_and_reads_each_operand_once():
    work = work_of(node("mm", {"self": ("bf16", (8, 16)), "mat2": ("bf16", (16, 32))}, [("bf16", (8, 32))]))
    assert work.matrix_flops == 2 * 8 * 32 * 16
    assert work.moved_bytes == 2 * (8 * 16 + 16 * 32 + 8 * 32)
    assert (work.launches, work.dtype, work.family) == (1.0, "bf16", "product")


@pytest.mark.each(
    ("op", "inputs", "flops"),
    [
        ("addmm", {"self": (32,), "mat1": (8, 16), "mat2": (16, 32)}, 2 * 8 * 32 * 16),
        ("bmm", {"self": (4, 8, 16), "mat2": (4, 16, 32)}, 4 * 2 * 8 * 32 * 16),
        ("baddbmm", {"self": (4, 8, 32), "batch1": (4, 8, 16), "batch2": (4, 16, 32)}, 4 * 2 * 8 * 32 * 16),
        ("mv", {"self": (8, 16), "vec": (16,)}, 2 * 8 * 16),
        ("dot", {"self": (16,), "tensor": (16,)}, 2 * 16),
        ("linear", {"input": (2, 8, 16), "weight": (32, 16)}, 2 * 16 * 32 * 16),
        ("_grouped_mm", {"self": (24, 16), "mat2": (4, 16, 32), "offs": (4,)}, 2 * 24 * 32 * 16),
        ("_grouped_mm", {"self": (8, 24), "mat2": (24, 32), "offs": (4,)}, 2 * 8 * 32 * 24),
    ],
)
def test_products_of_all_kinds(op, inputs, flops):
    given = {name: ("bf16", shape) for name, shape in inputs.items()}
    assert work_of(node(op, given, [("bf16", (1,))])).matrix_flops == flops


def attention(op, causal, queries=64, keys=64, heads=8, kv_heads=2, width=16, **more):
    q, k = ("bf16", (2, heads, queries, width)), ("bf16", (2, kv_heads, keys, width))
    grads = {"grad_out": q} if "backward" in op else {}
    return work_of(node(op, {**grads, "query": q, "key": k, "value": k, **more}, [q], is_causal=causal, dropout_p=0.0))


def test_fused_attention_counts_query_heads_and_half_of_a_causal_mask():
    name = "_scaled_dot_product_flash_attention_for_cpu"
    pairs = 2 * 8 * 64 * 64
    full = attention(name, False)
    assert full.matrix_flops == pairs * 4 * 16
    half = attention(name, True)
    assert half.matrix_flops == 2 * 8 * (64 * 65 / 2) * 4 * 16
    (kernel,) = half.kernels
    assert [kernel.shape[name] for name in ("heads", "kv_heads", "causal")] == [8, 2, 1.0]


def test_attention_backward_repeats_the_scores():
    forward, backward = (
        attention(f"_scaled_dot_product_flash_attention{suffix}", False) for suffix in ("", "_backward")
    )
    assert backward.matrix_flops == 2.5 * forward.matrix_flops
    assert backward.model_flops == 2 * forward.matrix_flops


def test_causal_mask_from_top_left_with_more_queries_than_keys():
    work = attention("_scaled_dot_product_efficient_attention", True, queries=6, keys=4)
    assert work.matrix_flops == 2 * 8 * (4 * 5 / 2 + 2 * 4) * 4 * 16


def test_kernels_with_tokens_before_heads():
    q = ("bf16", (2, 64, 8, 16))
    work = work_of(node("_flash_attention_forward", {"query": q, "key": q, "value": q}, [q], is_causal=False))
    assert work.matrix_flops == 2 * 8 * 64 * 64 * 4 * 16


def convolution(op="convolution", groups=1, transposed=False, mask=(1, 1, 0)):
    x, w = (2, 8, 10, 10), (16, 8 // groups, 3, 3)
    y = (2, 16, 8, 8)
    if transposed:
        x, y, w = (2, 16, 8, 8), (2, 8, 10, 10), (16, 8 // groups, 3, 3)
    inputs = {"grad_output": y} if "backward" in op else {}
    inputs |= {"input": x, "weight": w}
    attributes = {"stride": (1, 1), "padding": (0, 0), "transposed": transposed, "groups": groups}
    if "backward" in op:
        attributes["output_mask"] = tuple(bool(m) for m in mask)
    given = {name: ("fp32", shape) for name, shape in inputs.items()}
    return work_of(node(op, given, [("fp32", y if "backward" not in op else x)], **attributes))


def test_convolution_counts_taps_and_groups():
    whole = 2 * 2 * 64 * 8 * 16 * 9
    assert convolution().matrix_flops == whole
    assert convolution(groups=4).matrix_flops == whole / 4
    assert convolution(transposed=True).matrix_flops == whole
    assert convolution("convolution_backward").matrix_flops == 2 * whole
    assert convolution("convolution_backward", mask=(0, 1, 0)).matrix_flops == whole
    assert convolution("convolution_backward", groups=4).matrix_flops == 2 * whole / 4


def test_lstm_layer_counts_both_products_of_every_gate():
    x, h, w = ("fp32", (5, 3, 4)), ("fp32", (1, 3, 6)), ("fp32", (24, 4))
    work = work_of(
        node(
            "mkldnn_rnn_layer",
            {"input": x, "weight0": w, "hx_": h},
            [("fp32", (5, 3, 6))],
            mode=2,
            hidden_size=6,
            num_layers=1,
            bidirectional=False,
            batch_first=True,
        )
    )
    assert work.matrix_flops == 2 * 3 * 5 * 4 * 6 * (4 + 6)
    assert work.launches == 10


def test_views_and_sources_cost_nothing():
    work = work_of(node("view", {"self": ("fp32", (4, 4))}, [("fp32", (16,))]))
    assert (work.moved_bytes, work.launches, work.kernels, work.family) == (0.0, 0.0, (), "view")


def test_unknown_operator_moves_its_inputs_and_outputs():
    work = work_of(node("mystery", {"a": ("fp32", (4, 4)), "b": ("bf16", (8,))}, [("fp32", (4,))]))
    assert (work.moved_bytes, work.matrix_flops, work.family, work.launches) == (64 + 16 + 16, 0, "unknown", 1.0)


def test_an_expanded_input_is_read_once_and_a_repeated_one_too():
    nodes = Nodes()
    x = nodes.source("input", "x", TensorType((4, 8), "fp32"))
    mask = nodes.source("input", "m", TensorType((4, 8), "fp32", (0, 1)))
    square = nodes.apply("mul", {"self": x, "other": x}, outputs=[TensorType((4, 8), "fp32")])
    masked = nodes.apply("mul", {"self": x, "other": mask}, outputs=[TensorType((4, 8), "fp32")])
    assert work_of(square).moved_bytes == 2 * 128
    assert work_of(masked).moved_bytes == 2 * 128 + 32


@pytest.mark.each(
    ("op", "inputs", "outputs", "attributes", "moved"),
    [
        ("copy", {"self": ("fp32", (8,)), "src": ("bf16", (8,))}, [("fp32", (8,))], {}, 16 + 32),
        ("zero", {"self": ("fp32", (8,))}, [("fp32", (8,))], {}, 32),
        ("index_select", {"self": ("fp32", (99, 4)), "index": ("int64", (3,))}, [("fp32", (3, 4))], {"dim": 0},
         2 * 48 + 24),
        ("embedding", {"weight": ("bf16", (99, 4)), "indices": ("int64", (3,))}, [("bf16", (3, 4))], {}, 2 * 24),
        ("embedding_dense_backward", {"grad_output": ("bf16", (3, 4)), "indices": ("int64", (3,))},
         [("bf16", (99, 4))], {}, 99 * 8 + 3 * 24 + 24),
        ("nll_loss_forward", {"self": ("fp32", (5, 99)), "target": ("int64", (5,))}, [("fp32", ()), ("fp32", ())], {},
         5 * 4 + 40),
        ("nll_loss_backward", {"grad_output": ("fp32", ()), "self": ("fp32", (5, 99)), "target": ("int64", (5,))},
         [("fp32", (5, 99))], {}, 5 * 99 * 4 + 2 * 20 + 40),
        ("native_layer_norm", {"input": ("bf16", (6, 8)), "weight": ("bf16", (8,)), "bias": ("bf16", (8,))},
         [("bf16", (6, 8)), ("fp32", (6, 1)), ("fp32", (6, 1))], {"normalized_shape": (8,)}, 2 * (2 * 48 + 12 + 16)),
        ("native_batch_norm", {"input": ("fp32", (2, 3, 4, 4))}, [("fp32", (2, 3, 4, 4))], {"training": True},
         4 * (3 * 96 + 12)),
        ("native_batch_norm_backward", {"grad_out": ("fp32", (2, 3, 4, 4)), "input": ("fp32", (2, 3, 4, 4))},
         [("fp32", (2, 3, 4, 4))], {"train": True}, 4 * (5 * 96 + 15)),
        ("bernoulli", {"self": ("fp32", (8,))}, [("fp32", (8,))], {"p": 0.9}, 32),
        ("slice_backward", {"grad_output": ("fp32", (2,))}, [("fp32", (8,))], {}, 32 + 2 * 8),
        ("topk", {"self": ("fp32", (2, 8))}, [("fp32", (2, 2)), ("int64", (2, 2))], {"k": 2, "dim": -1},
         4 * 64 + 16 + 32),
    ],
)  # fmt: skip
def test_traffic_of_operators_that_do_not_touch_all_they_are_given(op, inputs, outputs, attributes, moved):
    assert work_of(node(op, inputs, outputs, **attributes)).moved_bytes == moved


def test_a_scatter_copies_its_target_unless_it_is_in_place():
    given = {"self": ("fp32", (99, 4)), "indices": [("int64", (3,))], "values": ("fp32", (3, 4))}
    put = node("index_put", given, [("fp32", (99, 4))], accumulate=True)
    assert work_of(put, inplace=True).moved_bytes == 3 * 48 + 24
    assert work_of(put).moved_bytes == 3 * 48 + 24 + 2 * 99 * 16


def test_operators_over_lists_launch_as_many_kernels_as_their_arguments_fill():
    many = [("fp32", (4,))] * 100
    add = work_of(node("_foreach_add", {"self": many, "other": many}, many))
    assert add.launches == 3  # 48 tensors of three lists each
    assert add.moved_bytes == 3 * 1600
    fused = dict.fromkeys(("self", "grads", "exp_avgs", "exp_avg_sqs"), many)
    adam = work_of(node("_fused_adamw", fused, many * 4), inplace=True)
    assert adam.moved_bytes == (4 + 3) * 1600, "gradients are written where they are unscaled only"
    scaled = {**fused, "grad_scale": ("fp32", ())}
    assert work_of(node("_fused_adamw", scaled, many * 4), inplace=True).moved_bytes == (4 + 4) * 1600 + 4
    assert adam.launches == 3  # 36 tensors of four lists each
    assert adam.vector_flops == 13 * 400
    large = work_of(node("_foreach_mul", {"self": [("fp32", (1 << 16, 3200))]}, [("fp32", (1 << 16, 3200))]))
    assert large.launches == 10


def test_every_operator_has_one_row():
    names = [name for row in ROWS for name in row.names.split()]
    assert len(names) == len(set(names)) == len(OPERATORS)
