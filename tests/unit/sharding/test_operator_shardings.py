"""Pieces of operators by hand: halos, masks, exchanges, work of the pieces, and what is kept replicated."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from aten_interpreter import call  # noqa: E402
from operator_samples import SAMPLES, Sample  # noqa: E402
from steptime.captured.cost import work_of  # noqa: E402
from steptime.captured.graph import Nodes, TensorType  # noqa: E402
from steptime.captured.ops import dims_of  # noqa: E402
from steptime.captured.ops.placement import placement_of  # noqa: E402
from steptime.sharding.local import local_node, local_type  # noqa: E402
from steptime.sharding.options import kept_replicated, options, strategies  # noqa: E402

CONV = {"transposed": False, "output_padding": (0, 0), "groups": 1}


def option(node, dim):
    return next(each for each in options(node) if each.dim == dim)


def strategy(node, dim, size=2):
    return next(each for each in strategies(node, (size,)) if each.dims == (dim,))


@pytest.mark.parametrize(
    "kernel, stride, padding, dilation", [(3, 1, 1, 1), (7, 2, 3, 1), (3, 1, 2, 2), (3, 2, 1, 1), (2, 2, 0, 1)]
)
def test_rows_of_a_halo_are_what_a_piece_needs(kernel, stride, padding, dilation):
    """Pieces with the rows of their neighbours, and zeros at the edges, make the convolution; with one row less not."""
    from steptime.captured.ops.convolutions import reach

    attributes = {"stride": (stride, 1), "padding": (padding, 1), "dilation": (dilation, 1), **CONV}
    sample = Sample("conv", "convolution", {"input": (1, 2, 32, 8), "weight": (3, 2, kernel, 3)}, attributes)
    before, after = reach(kernel, stride, padding, dilation)
    x, weight = sample.tensors
    padded = torch.nn.functional.pad(x, (0, 0, before, after))
    pieces = [padded[:, :, n * 8 : n * 8 + 8 + before + after] for n in range(4)]
    made = [
        torch.ops.aten.convolution(p, weight, None, [stride, 1], [0, 1], [dilation, 1], False, [0, 0], 1)
        for p in pieces
    ]
    torch.testing.assert_close(torch.cat(made, 2), sample.results[0])
    found = option(sample.node, "space0")
    if before + after:
        assert found.exchange.collective == "halo"
        assert found.exchange.size_bytes == (before + after) * 2 * 8 * 8  # rows x channels x columns x bytes
    else:
        assert found.exchange is None


def test_a_halo_is_divided_by_the_other_axis():
    node = SAMPLES["convolution"].node
    found = {each.dims: each.exchanges for each in strategies(node, (2, 4)) if "space0" in each.dims}
    whole, images = found["space0", ""][0].size_bytes, found["space0", "images"][0].size_bytes
    assert (whole, images) == (2 * 8 * 8 * 16 * 8, whole // 4)


@pytest.mark.parametrize("name, dim, at", [("embedding", "rows", 0), ("index", "row0", 0), ("index_select", "row", 1),
                                           ("gather", "row", 1), ("gather:part", "row", 1)])  # fmt: skip
def test_rows_that_are_read_are_terms_with_a_mask(name, dim, at):
    """Each device reads the rows of its piece, and zeros in place of the others."""
    sample = SAMPLES[name]
    found, (table, indices), total = option(sample.node, dim), sample.tensors, 0
    assert found.masked and list(map(str, (*found.inputs, *found.outputs))) == [f"S({at})", "R", "P"]
    half = table.shape[at] // 2
    for n, piece in enumerate(table.chunk(2, at)):
        own = indices // half == n
        rows = call(local_node(sample.node, strategy(sample.node, dim), (2,), Nodes()), [piece, indices % half])[0]
        while own.ndim < rows.ndim:
            own = own[..., None]
        total = total + rows * (own if name != "index_select" else own.reshape(1, -1, 1))
    torch.testing.assert_close(total, sample.results[0])


@pytest.mark.parametrize("name, dim, index, values", [("embedding_dense_backward", "rows", 1, 0),
                                                      ("index_put", "row0", 1, 2),
                                                      ("scatter_add", "row", 1, 2)])  # fmt: skip
def test_rows_that_are_written_are_pieces_with_a_mask(name, dim, index, values):
    """Each device adds what goes into its piece, and zeros in place of the others."""
    sample = SAMPLES[name]
    at = option(sample.node, dim).outputs[0].dim
    node, half = local_node(sample.node, strategy(sample.node, dim), (2,), Nodes()), sample.results[0].shape[at] // 2
    made = []
    for n in range(2):
        given = [t.chunk(2, at)[n].clone() if name != "embedding_dense_backward" and k == 0 else t.clone()
                 for k, t in enumerate(sample.tensors)]  # fmt: skip
        own = given[index] // half == n
        given[values] = given[values] * (own if own.ndim == given[values].ndim else own[..., None])
        given[index] = given[index] % half
        made.append(call(node, given)[0])
    torch.testing.assert_close(torch.cat(made, at), sample.results[0])


def test_classes_of_a_loss_are_terms_with_a_mask():
    sample = SAMPLES["nll_loss_forward:sum"]
    (scores, target), total = sample.tensors, 0
    for n, piece in enumerate(scores.chunk(2, 1)):
        shifted = torch.where(target // 12 == n, target - 12 * n, -100)
        total = total + torch.ops.aten.nll_loss_forward(piece, shifted, None, 2, -100)[0]
    torch.testing.assert_close(total, sample.results[0])


def test_softmax_over_pieces_exchanges_two_numbers_of_each_row():
    sample = SAMPLES["_softmax"]
    found = option(sample.node, "d2")
    assert found.exchange.size_bytes == 2 * 8 * 16 * 8
    pieces = sample.tensors[0].chunk(2, 2)
    largest = torch.stack([piece.amax(2, True) for piece in pieces]).amax(0)
    sums = sum((piece - largest).exp().sum(2, True) for piece in pieces)
    torch.testing.assert_close(torch.cat([(p - largest).exp() / sums for p in pieces], 2), sample.results[0])


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm", "convolution", "convolution:bias", "_grouped_mm",
                                  "convolution:grouped", "convolution_backward", "convolution:transposed",
                                  "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
                                  "_scaled_dot_product_flash_attention_backward"])  # fmt: skip
def test_work_of_all_pieces_is_that_of_the_whole(name):
    """Matrix operations of all devices add up, whatever dim is split over both axes, and no piece moves more bytes."""
    node = SAMPLES[name].node
    whole, split = work_of(node), 0
    for each in strategies(node, (2, 4)):
        part = work_of(local_node(node, each, (2, 4), Nodes()))
        terms = any(dim.startswith("terms") or not dim for dim in each.dims)
        assert part.moved_bytes <= whole.moved_bytes
        if not terms and "tokens" not in each.dims:
            assert part.matrix_flops * 8 == pytest.approx(whole.matrix_flops), each.dims
            split += 1
    assert split >= 3


@pytest.mark.parametrize("name, share", [("_scaled_dot_product_efficient_attention", 1.0),
                                         ("_scaled_dot_product_flash_attention", 16 / 17)])  # fmt: skip
def test_work_of_split_tokens(name, share):
    """All keys for a part of the queries; under a causal mask half of them, a little less than its 17 / 16 halves."""
    node = SAMPLES[name].node
    part = work_of(local_node(node, strategy(node, "tokens"), (2,), Nodes()))
    assert part.matrix_flops * 2 == pytest.approx(work_of(node).matrix_flops * share)


def test_gathered_keys_are_all_of_keys_and_values():
    found = option(SAMPLES["_scaled_dot_product_flash_attention"].node, "tokens").exchange
    assert (found.collective, found.size_bytes, found.across) == (
        "all_gather",
        2 * 8 * 8 * 16 * 4 * 8,
        ("batch", "heads"),
    )


def test_groups_of_heads_go_with_their_keys():
    attributes, q, k = {"is_causal": True}, (8, 8, 16, 4), (8, 2, 16, 4)
    nodes = Nodes()
    given = {
        name: nodes.source("input", name, TensorType(s, "fp32")) for name, s in (("query", q), ("key", k), ("value", k))
    }
    outputs = [TensorType(q, "fp32"), TensorType(q[:3], "fp32")]
    node = nodes.apply("_scaled_dot_product_flash_attention_for_cpu", given, attributes, outputs=outputs)
    assert option(node, "heads").units == 2
    assert ("heads", "heads") not in {each.dims for each in strategies(node, (2, 4))}
    local = local_node(node, next(s for s in strategies(node, (2, 4)) if s.dims == ("heads", "")), (2, 4), nodes)
    assert [value.type.shape[1] for value in local.inputs] == [4, 1, 1]


def test_a_dim_that_no_axis_divides_is_not_split():
    nodes = Nodes()
    x = nodes.source("input", "x", TensorType((6, 16), "fp32"))
    node = nodes.apply("relu", {"self": x}, outputs=[x.type])
    assert {each.dims for each in strategies(node, (2, 4))} == {
        ("", ""),
        ("", "d1"),
        ("d0", ""),
        ("d0", "d1"),
        ("d1", ""),
        ("d1", "d1"),
    }
    assert not kept_replicated(node, (2, 4))
    assert "5 devices divide none of d0 (6), d1 (16)" in kept_replicated(node, (5,))


def test_an_unknown_operator_is_replicated():
    nodes = Nodes()
    x = nodes.source("input", "x", TensorType((8, 16), "fp32"))
    node = nodes.apply("my_operator", {"self": x}, outputs=[x.type])
    assert dims_of(node) is None and [each.dims for each in strategies(node, (2, 4))] == [("", "")]
    assert "nothing is known" in kept_replicated(node, (2, 4))


def test_strategies_have_no_equal_placements():
    for sample in SAMPLES.values():
        made = [(each.inputs, each.outputs) for each in strategies(sample.node, (2, 4))]
        assert len(made) == len(set(made)) and strategies(sample.node, (2, 4))[0].replicated


def test_pieces_keep_the_order_of_dims_in_memory():
    broadcast = local_type(TensorType((8, 4, 6), "fp32", (6, 0, 1)), (placement_of("S(0)"),), (2,))
    assert (broadcast.shape, broadcast.strides) == ((4, 4, 6), (6, 0, 1))
