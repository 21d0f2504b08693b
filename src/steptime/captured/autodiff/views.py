"""Gradients of operators that show, cut, join and index tensors."""

from __future__ import annotations

from steptime.captured.aten import maths
from steptime.captured.aten.views import (
    cat,
    like,
    permute,
    reshape,
    select,
    slice,
    squeeze,
    t,
    tensor_type,
    transpose,
    unsqueeze,
    wrap,
)
from steptime.captured.autodiff.table import Pulled, Step, linear, reverse
from steptime.captured.graph.program import Attribute, Nodes, TensorType, Value

for _name in (
    "view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "expand", "slice", "select", "squeeze",
    "unsqueeze", "split", "split_with_sizes", "unbind", "unsafe_split", "unsafe_split_with_sizes", "clone", "alias",
    "_to_copy", "flip", "roll", "repeat", "index_select", "gather", "index", "tril", "triu", "cumsum", "neg", "detach",
    "reflection_pad1d", "reflection_pad2d", "replication_pad2d", "diagonal", "pixel_shuffle", "pixel_unshuffle",
):  # fmt: skip
    linear(_name, "self")
linear("cat", "tensors")
linear("stack", "tensors")
linear("embedding", "weight")


@reverse("view", "_unsafe_view", "_reshape_alias")
def _view(step: Step) -> Pulled:
    return {"self": reshape(step.nodes, step.grad, step.input("self").type.shape)}


@reverse("t")
def _t(step: Step) -> Pulled:
    return {"self": t(step.nodes, step.grad) if step.grad.type.rank == 2 else step.grad}


@reverse("transpose")
def _transpose(step: Step) -> Pulled:
    return {"self": transpose(step.nodes, step.grad, int(step.number("dim0", 0)), int(step.number("dim1", 0)))}


@reverse("permute")
def _permute(step: Step) -> Pulled:
    dims = [wrap(dim, step.grad.type.rank) for dim in step.ints("dims")]
    return {"self": permute(step.nodes, step.grad, [dims.index(dim) for dim in range(len(dims))])}


@reverse("expand")
def _expand(step: Step) -> Pulled:
    return {"self": maths.sum_to(step.nodes, step.grad, step.input("self").type.shape)}


@reverse("unsqueeze")
def _unsqueeze(step: Step) -> Pulled:
    return {"self": squeeze(step.nodes, step.grad, (int(step.number("dim", 0)),))}


@reverse("squeeze")
def _squeeze(step: Step) -> Pulled:
    """Dims of size 1 put back where they were; with all dims at once a view does it."""
    shape, grad = step.input("self").type.shape, step.grad
    dims = [wrap(dim, len(shape)) for dim in step.ints("dim", range(len(shape)))]
    for dim in sorted(dim for dim in dims if shape and shape[dim] == 1):
        grad = unsqueeze(step.nodes, grad, dim)
    return {"self": grad}


@reverse("slice", "select")
def _cut(step: Step) -> Pulled:
    """``slice_backward`` and ``select_backward``: zeros with the gradient in its place."""
    shape = step.input("self").type.shape
    dim = int(step.number("dim", 0))
    attributes: dict[str, Attribute] = {"input_sizes": shape, "dim": dim}
    if step.node.op == "select":
        attributes["index"] = step.get("index", 0)
    else:
        end = step.get("end")
        size = shape[wrap(dim, len(shape))]
        attributes |= {
            "start": step.get("start") or 0,
            "end": size if end is None else end,
            "step": step.get("step", 1),
        }
    output = tensor_type(shape, step.grad.type.dtype)
    made = step.nodes.apply(f"{step.node.op}_backward", {"grad_output": step.grad}, attributes, outputs=[output])
    return {"self": made.value()}


def _all_gradients(step: Step) -> list[Value]:
    """Gradients of all outputs, zeros for those that nothing reads."""
    return [
        maths.full(step.nodes, type.shape, 0, type.dtype) if grad is None else grad
        for grad, type in zip(step.grads, step.node.outputs, strict=True)
    ]


@reverse("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def _split(step: Step) -> Pulled:
    return {"self": cat(step.nodes, _all_gradients(step), int(step.number("dim", 0)))}


@reverse("unbind")
def _unbind(step: Step) -> Pulled:
    parts = _all_gradients(step)
    dim = wrap(int(step.number("dim", 0)), step.input("self").type.rank)
    output = TensorType(step.input("self").type.shape, parts[0].type.dtype)
    return {"self": step.nodes.apply("stack", {"tensors": parts}, {"dim": dim}, outputs=[output]).value()}


@reverse("cat")
def _cat(step: Step) -> Pulled:
    parts, start = step.node.inputs_of("tensors"), 0
    out: list[Value | None] = []
    for part in parts:
        dim = wrap(int(step.number("dim", 0)), step.grad.type.rank)
        if part.type.rank != step.grad.type.rank:
            out.append(None)
            continue
        size = part.type.shape[dim]
        out.append(slice(step.nodes, step.grad, dim, start, start + size))
        start += size
    return {"tensors": out}


@reverse("stack")
def _stack(step: Step) -> Pulled:
    dim = int(step.number("dim", 0))
    return {"tensors": [select(step.nodes, step.grad, dim, n) for n in range(len(step.node.inputs_of("tensors")))]}


@reverse("constant_pad_nd")
def _pad(step: Step) -> Pulled:
    pads = tuple(-n for n in step.ints("pad"))
    output = TensorType(step.input("self").type.shape, step.grad.type.dtype)
    attributes: dict[str, Attribute] = {"pad": pads, "value": 0.0}
    return {"self": step.nodes.apply("constant_pad_nd", {"self": step.grad}, attributes, outputs=[output]).value()}


@reverse("flip", "tril", "triu")
def _same(step: Step) -> Pulled:
    """Each is its own transpose."""
    attributes = dict(step.node.attributes)
    return {
        "self": step.nodes.apply(step.node.op, {"self": step.grad}, attributes, outputs=[like(step.grad.type)]).value()
    }


@reverse("roll")
def _roll(step: Step) -> Pulled:
    attributes: dict[str, Attribute] = {"shifts": tuple(-n for n in step.ints("shifts"))}
    attributes |= step.kept("dims")
    return {"self": step.nodes.apply("roll", {"self": step.grad}, attributes, outputs=[like(step.grad.type)]).value()}


@reverse("repeat")
def _repeat(step: Step) -> Pulled:
    """The gradient with each dim cut into (copies, size), summed over copies."""
    nodes, repeats, shape = step.nodes, step.ints("repeats"), step.input("self").type.shape
    padded = (1,) * (len(repeats) - len(shape)) + shape
    cut = [n for pair in zip(repeats, padded, strict=True) for n in pair]
    grad = reshape(nodes, step.grad, cut)
    grad = maths.reduce(nodes, "sum", grad, range(0, 2 * len(repeats), 2), False)
    return {"self": reshape(nodes, grad, shape)}


@reverse("cumsum")
def _cumsum(step: Step) -> Pulled:
    nodes, dim = step.nodes, wrap(int(step.number("dim", 0)), step.grad.type.rank)
    grad = flip(nodes, step.grad, dim)
    grad = nodes.apply("cumsum", {"self": grad}, {"dim": dim}, outputs=[like(grad.type)]).value()
    return {"self": flip(nodes, grad, dim)}


def flip(nodes: Nodes, x: Value, dim: int) -> Value:
    """One dim backwards."""
    return nodes.apply("flip", {"self": x}, {"dims": (dim,)}, outputs=[like(x.type)]).value()


@reverse("embedding")
def _embedding(step: Step) -> Pulled:
    weight = step.input("weight").type
    attributes: dict[str, Attribute] = {
        "num_weights": weight.shape[0],
        "padding_idx": step.get("padding_idx", -1),
        "scale_grad_by_freq": step.get("scale_grad_by_freq", False),
    }
    inputs = {"grad_output": step.grad, "indices": step.input("indices")}
    output = TensorType(weight.shape, step.grad.type.dtype)
    return {"weight": step.nodes.apply("embedding_dense_backward", inputs, attributes, outputs=[output]).value()}


def _zeros(step: Step, name: str) -> Value:
    type = step.input(name).type
    return maths.full(step.nodes, type.shape, 0, step.grad.type.dtype)


@reverse("index_select")
def _index_select(step: Step) -> Pulled:
    zeros = _zeros(step, "self")
    inputs = {"self": zeros, "index": step.input("index"), "source": step.grad}
    return {"self": step.nodes.apply("index_add", inputs, step.kept("dim"), outputs=[zeros.type]).value()}


@reverse("gather")
def _gather(step: Step) -> Pulled:
    zeros = _zeros(step, "self")
    inputs = {"self": zeros, "index": step.input("index"), "src": step.grad}
    return {"self": step.nodes.apply("scatter_add", inputs, step.kept("dim"), outputs=[zeros.type]).value()}


@reverse("index")
def _index(step: Step) -> Pulled:
    zeros = _zeros(step, "self")
    inputs: dict[str, Value | tuple[Value, ...]] = {
        "self": zeros, "indices": step.node.inputs_of("indices"), "values": step.grad,
    }  # fmt: skip
    return {"self": step.nodes.apply("index_put", inputs, {"accumulate": True}, outputs=[zeros.type]).value()}


@reverse("scatter_add", "index_add")
def _scatter_add(step: Step) -> Pulled:
    name = "src" if step.node.op == "scatter_add" else "source"
    op = "gather" if step.node.op == "scatter_add" else "index_select"
    inputs = {"self": step.grad, "index": step.input("index")}
    output = TensorType(step.input(name).type.shape, step.grad.type.dtype)
    return {"self": step.grad, name: step.nodes.apply(op, inputs, step.kept("dim"), outputs=[output]).value()}


@reverse("index_copy")
def _index_copy(step: Step) -> Pulled:
    nodes, index, dim = step.nodes, step.input("index"), step.kept("dim")
    output = TensorType(step.input("source").type.shape, step.grad.type.dtype)
    source = nodes.apply("index_select", {"self": step.grad, "index": index}, dim, outputs=[output]).value()
    attributes: dict[str, Attribute] = {**dim, "value": 0}
    kept = nodes.apply("index_fill", {"self": step.grad, "index": index}, attributes, outputs=[step.grad.type])
    return {"self": kept.value(), "source": source}


@reverse("scatter")
def _scatter(step: Step) -> Pulled:
    nodes, index, dim = step.nodes, step.input("index"), step.kept("dim")
    blank = nodes.apply("scatter", {"self": step.grad, "index": index}, {**dim, "value": 0}, outputs=[step.grad.type])
    pulled = {"self": blank.value()}
    if step.needs("src"):
        output = TensorType(step.input("src").type.shape, step.grad.type.dtype)
        pulled["src"] = nodes.apply("gather", {"self": step.grad, "index": index}, dim, outputs=[output]).value()
    return pulled
