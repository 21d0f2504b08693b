"""One node of each operator with small tensors that a mesh of 2 x 4 divides: what the tests of shardings run."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from aten_interpreter import NAMES, call  # noqa: E402
from steptime.captured.graph import Nodes, TensorType  # noqa: E402

F = torch.float64


class Sample:
    """A node, and tensors for its inputs."""

    def __init__(self, name, op, inputs, attributes, run=True, outputs=None):
        self.name, self.op, self.run = name, op, run
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        nodes, values, self.tensors = Nodes(), {}, []
        for key, given in inputs.items():
            members = given if isinstance(given, list) else [given]
            made = [tensor_of(each, generator) for each in members]
            self.tensors += made
            named = [
                nodes.source("input", f"{key}{n}", TensorType(tuple(t.shape), NAMES[t.dtype]))
                for n, t in enumerate(made)
            ]
            values[key] = named if isinstance(given, list) else named[0]
        probe = nodes.apply(op, values, attributes, outputs=[])
        if outputs is None:
            self.results = call(probe, [t.clone() for t in self.tensors])
            outputs = [TensorType(tuple(t.shape), NAMES[t.dtype]) for t in self.results]
        else:
            outputs = [TensorType(shape, dtype) for dtype, shape in outputs]
        self.node = nodes.apply(op, values, attributes, outputs=outputs)


def tensor_of(given, generator):
    """A shape: random numbers; (shape, high): random indices; a tensor: itself."""
    if isinstance(given, torch.Tensor):
        return given
    if given and isinstance(given[0], tuple):
        return torch.randint(0, given[1], given[0], generator=generator)
    return torch.randn(given, generator=generator, dtype=F)


def _conv(stride, padding, dilation=(1, 1), groups=1, transposed=False):
    return {"stride": stride, "padding": padding, "dilation": dilation, "transposed": transposed,
            "output_padding": (0, 0), "groups": groups}  # fmt: skip


X, Q, KV, IMAGE = (8, 16, 24), (8, 8, 16, 4), (8, 4, 16, 4), (8, 8, 16, 16)
MASK3 = {"output_mask": (True, True, True)}
TABLE = [
    ("mm", {"self": (8, 16), "mat2": (16, 24)}, {}),
    ("addmm", {"self": (24,), "mat1": (8, 16), "mat2": (16, 24)}, {}),
    ("bmm", {"self": (8, 16, 24), "mat2": (8, 24, 32)}, {}),
    ("baddbmm", {"self": (8, 16, 32), "batch1": (8, 16, 24), "batch2": (8, 24, 32)}, {}),
    ("mv", {"self": (8, 16), "vec": (16,)}, {}),
    ("dot", {"self": (16,), "tensor": (16,)}, {}),
    ("add", {"self": X, "other": X}, {}),
    ("add:bias", {"self": X, "other": (24,)}, {}),
    ("add:scalar", {"self": X}, {"other": 1.5}),
    ("sub", {"self": X, "other": (1, 16, 24)}, {}),
    ("rsub", {"self": X}, {"other": 1.0}),
    ("mul", {"self": X, "other": (8, 16, 1)}, {}),
    ("mul:scalar", {"self": X}, {"other": 2.0}),
    ("div", {"self": X, "other": X}, {}),
    ("div:scalar", {"self": X}, {"other": 4.0}),
    ("pow", {"self": X}, {"exponent": 2}),
    ("neg", {"self": X}, {}), ("exp", {"self": X}, {}), ("tanh", {"self": X}, {}), ("sigmoid", {"self": X}, {}),
    ("relu", {"self": X}, {}), ("gelu", {"self": X}, {}), ("silu", {"self": X}, {}), ("abs", {"self": X}, {}),
    ("sin", {"self": X}, {}), ("cos", {"self": X}, {}), ("rsqrt", {"self": torch.rand(X, dtype=F) + 1}, {}),
    ("sqrt", {"self": torch.rand(X, dtype=F) + 1}, {}), ("log", {"self": torch.rand(X, dtype=F) + 1}, {}),
    ("maximum", {"self": X, "other": X}, {}), ("clamp", {"self": X}, {"min": -0.5, "max": 0.5}),
    ("addcmul", {"self": X, "tensor1": X, "tensor2": X}, {"value": 0.5}),
    ("addcdiv", {"self": X, "tensor1": X, "tensor2": torch.rand(X, dtype=F) + 1}, {"value": 0.5}),
    ("lerp", {"self": X, "end": X}, {"weight": 0.25}),
    ("where", {"condition": torch.arange(8 * 16 * 24).reshape(X) % 3 == 0, "self": X, "other": X}, {}),
    ("masked_fill", {"self": X, "mask": torch.arange(8 * 16 * 24).reshape(X) % 3 == 0}, {"value": 0}),
    ("eq", {"self": X, "other": X}, {}), ("le", {"self": X}, {"other": 0.5}),
    ("logical_not", {"self": X}, {}),
    ("_to_copy", {"self": X}, {"dtype": "fp32"}), ("clone", {"self": X}, {}),
    ("threshold_backward", {"grad_output": X, "self": X}, {"threshold": 0}),
    ("gelu_backward", {"grad_output": X, "self": X}, {}), ("silu_backward", {"grad_output": X, "self": X}, {}),
    ("tanh_backward", {"grad_output": X, "output": X}, {}),
    ("sigmoid_backward", {"grad_output": X, "output": X}, {}),
    ("native_dropout_backward",
     {"grad_output": X, "mask": torch.arange(8 * 16 * 24).reshape(X) % 3 == 0}, {"scale": 2.0}),
    ("sum", {"self": X}, {"dim": (1,), "keepdim": False}), ("sum:kept", {"self": X}, {"dim": (0, 1), "keepdim": True}),
    ("sum:all", {"self": X}, {}),
    ("mean", {"self": X}, {"dim": (-1,), "keepdim": True}), ("mean:all", {"self": X}, {}),
    ("amax", {"self": X}, {"dim": (2,), "keepdim": False}), ("amin", {"self": X}, {"dim": (2,), "keepdim": True}),
    ("var", {"self": X}, {"dim": (2,), "correction": 1, "keepdim": False}),
    ("linalg_vector_norm", {"self": X}, {"ord": 2, "dim": (2,)}),
    ("logsumexp", {"self": X}, {"dim": (2,)}),
    ("all", {"self": torch.ones(X, dtype=torch.bool)}, {}), ("any", {"self": torch.ones(X, dtype=torch.bool)}, {}),
    ("argmax", {"self": X}, {"dim": 2, "keepdim": False}), ("cumsum", {"self": X}, {"dim": 1}),
    ("topk", {"self": X}, {"k": 2, "dim": -1}), ("sort", {"self": X}, {"dim": 1}),
    ("_softmax", {"self": X}, {"dim": 2, "half_to_float": False}),
    ("_log_softmax", {"self": (16, 24)}, {"dim": 1, "half_to_float": False}),
    ("_softmax_backward_data", {"grad_output": X, "output": X}, {"dim": 2, "input_dtype": "fp64"}),
    ("_log_softmax_backward_data", {"grad_output": (16, 24), "output": (16, 24)}, {"dim": 1, "input_dtype": "fp64"}),
    ("native_layer_norm", {"input": X, "weight": (24,), "bias": (24,)}, {"normalized_shape": (24,), "eps": 1e-5}),
    ("native_layer_norm_backward",
     {"grad_out": X, "input": X, "mean": (8, 16, 1), "rstd": (8, 16, 1), "weight": (24,), "bias": (24,)},
     {"normalized_shape": (24,), **MASK3}),
    ("_fused_rms_norm", {"input": X, "weight": (24,)}, {"normalized_shape": (24,), "eps": 1e-5}),
    ("native_group_norm", {"input": IMAGE, "weight": (8,), "bias": (8,)},
     {"N": 8, "C": 8, "HxW": 256, "group": 8, "eps": 1e-5}),
    ("native_group_norm_backward",
     {"grad_out": IMAGE, "input": IMAGE, "mean": (8, 8), "rstd": (8, 8), "weight": (8,)},
     {"N": 8, "C": 8, "HxW": 256, "group": 8, **MASK3}),
    ("native_batch_norm", {"input": IMAGE, "weight": (8,), "bias": (8,), "running_mean": (8,),
                           "running_var": torch.ones(8, dtype=F)}, {"training": True, "momentum": 0.1, "eps": 1e-5}),
    ("native_batch_norm_backward",
     {"grad_out": IMAGE, "input": IMAGE, "weight": (8,), "running_mean": (8,), "running_var": torch.ones(8, dtype=F),
      "save_mean": (8,), "save_invstd": (8,)}, {"train": True, "eps": 1e-5, **MASK3}),
    ("nll_loss_forward", {"self": (16, 24), "target": ((16,), 24)}, {"reduction": 1, "ignore_index": -100}),
    ("nll_loss_forward:sum", {"self": (16, 24), "target": ((16,), 24)}, {"reduction": 2, "ignore_index": -100}),
    ("nll_loss_backward", {"grad_output": (), "self": (16, 24), "target": ((16,), 24), "total_weight": ()},
     {"reduction": 1, "ignore_index": -100}),
    ("mse_loss", {"self": X, "target": X}, {"reduction": 1}),
    ("mse_loss_backward", {"grad_output": X, "self": X, "target": X}, {"reduction": 2}),
    ("_scaled_dot_product_flash_attention_for_cpu", {"query": Q, "key": Q, "value": Q}, {"is_causal": True}),
    ("_scaled_dot_product_flash_attention_for_cpu:all", {"query": Q, "key": Q, "value": Q}, {"is_causal": False}),
    ("_scaled_dot_product_flash_attention_for_cpu_backward",
     {"grad_out": Q, "query": Q, "key": Q, "value": Q, "out": Q, "logsumexp": (8, 8, 16)},
     {"dropout_p": 0.0, "is_causal": True}),
    ("convolution", {"input": IMAGE, "weight": (16, 8, 3, 3)}, _conv((1, 1), (1, 1))),
    ("convolution:bias", {"input": IMAGE, "weight": (16, 8, 3, 3), "bias": (16,)}, _conv((2, 2), (1, 1))),
    ("convolution:grouped", {"input": IMAGE, "weight": (8, 1, 3, 3), "bias": (8,)}, _conv((1, 1), (1, 1), groups=8)),
    ("convolution:patches", {"input": IMAGE, "weight": (16, 8, 2, 2)}, _conv((2, 2), (0, 0))),
    ("convolution:transposed", {"input": IMAGE, "weight": (8, 16, 2, 2)}, _conv((2, 2), (0, 0), transposed=True)),
    ("convolution_backward", {"grad_output": (8, 16, 16, 16), "input": IMAGE, "weight": (16, 8, 3, 3)},
     {"bias_sizes": (16,), **_conv((1, 1), (1, 1)), **MASK3}),
    ("convolution_backward:grouped", {"grad_output": IMAGE, "input": IMAGE, "weight": (8, 1, 3, 3)},
     {"bias_sizes": (8,), **_conv((1, 1), (1, 1), groups=8), **MASK3}),
    ("convolution_backward:patches", {"grad_output": (8, 16, 8, 8), "input": IMAGE, "weight": (16, 8, 2, 2)},
     {"bias_sizes": (16,), **_conv((2, 2), (0, 0)), **MASK3}),
    ("max_pool2d_with_indices", {"self": IMAGE}, {"kernel_size": (2, 2), "stride": (2, 2)}),
    ("avg_pool2d", {"self": IMAGE}, {"kernel_size": (2, 2), "stride": (2, 2)}),
    ("_adaptive_avg_pool2d", {"self": IMAGE}, {"output_size": (2, 2)}),
    ("upsample_nearest2d", {"self": IMAGE}, {"output_size": (32, 32)}),
    ("view", {"self": X}, {"size": (128, 24)}), ("view:split", {"self": (128, 24)}, {"size": (8, 16, 24)}),
    ("view:heads", {"self": X}, {"size": (8, 16, 8, 3)}), ("view:both", {"self": (16, 24)}, {"size": (24, 16)}),
    ("_unsafe_view", {"self": (8, 16, 8, 3)}, {"size": (128, 24)}),
    ("t", {"self": (8, 16)}, {}), ("transpose", {"self": X}, {"dim0": 0, "dim1": 2}),
    ("permute", {"self": X}, {"dims": (2, 0, 1)}), ("unsqueeze", {"self": X}, {"dim": 1}),
    ("squeeze", {"self": (8, 1, 16)}, {"dim": 1}), ("expand", {"self": (8, 1, 16)}, {"size": (8, 24, 16)}),
    ("slice", {"self": X}, {"dim": 1, "start": 0, "end": 8}), ("slice:whole", {"self": X}, {"dim": 1}),
    ("select", {"self": X}, {"dim": 1, "index": 3}), ("split", {"self": X}, {"split_size": 8, "dim": 2}),
    ("unbind", {"self": X}, {"dim": 0}), ("detach", {"self": X}, {}), ("alias", {"self": X}, {}),
    ("slice_backward", {"grad_output": (8, 8, 24)}, {"input_sizes": X, "dim": 1, "start": 0, "end": 8, "step": 1}),
    ("select_backward", {"grad_output": (8, 24)}, {"input_sizes": X, "dim": 1, "index": 3}),
    ("cat", {"tensors": [X, X]}, {"dim": 1}), ("stack", {"tensors": [X, X]}, {"dim": 1}),
    ("constant_pad_nd", {"self": X}, {"pad": (0, 1), "value": 0}), ("flip", {"self": X}, {"dims": (1,)}),
    ("tril", {"self": X}, {}), ("repeat", {"self": (8, 16)}, {"repeats": (1, 2)}),
    ("zeros_like", {"self": X}, {}), ("ones_like", {"self": X}, {}), ("full_like", {"self": X}, {"fill_value": 2.0}),
    ("new_zeros", {"self": X}, {"size": (8, 16)}),
    ("embedding", {"weight": (24, 16), "indices": ((8, 16), 24)}, {}),
    ("embedding_dense_backward", {"grad_output": (8, 16, 24), "indices": ((8, 16), 32)},
     {"num_weights": 32, "padding_idx": -1, "scale_grad_by_freq": False}),
    ("index", {"self": (16, 24), "indices": [((8,), 16)]}, {}),
    ("index_put", {"self": (16, 24), "indices": [((8,), 16)], "values": (8, 24)}, {"accumulate": True}),
    ("index_select", {"self": X, "index": ((8,), 16)}, {"dim": 1}),
    ("gather", {"self": X, "index": (X, 16)}, {"dim": 1}),
    ("gather:part", {"self": X, "index": ((8, 8, 24), 16)}, {"dim": 1}),
    ("scatter", {"self": X, "index": ((8, 8, 24), 16), "src": (8, 8, 24)}, {"dim": 1}),
    ("scatter_add", {"self": X, "index": ((8, 8, 24), 16), "src": (8, 8, 24)}, {"dim": 1}),
    ("histc", {"self": (16,)}, {"bins": 8, "min": -3, "max": 3}),
]  # fmt: skip
HALF, LONG = "bf16", "int64"
CUDA = [
    ("_scaled_dot_product_flash_attention", {"query": Q, "key": Q, "value": Q}, {"dropout_p": 0.0, "is_causal": True},
     [("fp32", Q), ("fp32", (8, 8, 16)), (LONG, (2,)), (LONG, ()), ("fp32", (0,))]),
    ("_scaled_dot_product_efficient_attention", {"query": Q, "key": Q, "value": Q},
     {"compute_log_sumexp": True, "is_causal": False},
     [("fp32", Q), ("fp32", (8, 8, 32)), (LONG, ()), (LONG, ())]),
    ("_scaled_dot_product_flash_attention_backward",
     {"grad_out": Q, "query": Q, "key": Q, "value": Q, "out": Q, "logsumexp": (8, 8, 16),
      "philox_seed": ((2,), 9), "philox_offset": ((), 9)},
     {"max_q": 16, "max_k": 16, "dropout_p": 0.0, "is_causal": True}, [("fp32", Q)] * 3),
    ("_grouped_mm", {"self": (32, 64), "mat2": (8, 64, 64), "offs": ((8,), 9)}, {}, [("fp32", (32, 64))]),
    ("_fused_rms_norm_backward", {"grad_out": X, "input": X, "rstd": (8, 16, 1), "weight": (24,)},
     {"normalized_shape": (24,), "output_mask": (True, True)}, [("fp64", X), ("fp64", (24,))]),
    ("native_dropout", {"input": X}, {"p": 0.1, "train": True}, [("fp64", X), ("bool", X)]),
]  # fmt: skip


def samples():
    """Every sample; operators that need CUDA, or draw, are not run."""
    made = [Sample(name, name.partition(":")[0], inputs, attributes) for name, inputs, attributes in TABLE]
    return made + [Sample(name, name, inputs, attributes, False, outputs) for name, inputs, attributes, outputs in CUDA]


SAMPLES = {sample.name: sample for sample in samples()}
