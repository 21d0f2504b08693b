"""Memory as the objective of a training step: the claimed peak is the one of a run, and the step computes the same."""

import pytest

torch = pytest.importorskip("torch")

from models.bert import bert  # noqa: E402
from rewritten import H100, F, nn, traced  # noqa: E402
from steptime.captured.graph.liveness import Liveness  # noqa: E402
from steptime.captured.graph.program import SOURCES  # noqa: E402
from steptime.rewrite.checking import check  # noqa: E402
from steptime.rewrite.engine import apply_passes  # noqa: E402
from steptime.rewrite.kernels import evaluate, random_contents, run  # noqa: E402
from steptime.rewrite.trace import trace  # noqa: E402


def peak_of_a_run(flow):
    """Most bytes of distinct storages while the step runs on real tensors, each freed after its last reader."""
    contents = random_contents(flow)
    sources = [node for node in flow.order if node.op in SOURCES]
    known = {node: tuple(evaluate(flow, [node.value()], contents)) for node in sources}
    order = [call.node for call in flow.program().calls]
    last = {value: number for number, node in enumerate(order) for value in node.inputs}
    kept = {*flow.outputs, *(node.value() for node in sources)}
    most = 0
    with torch.no_grad():
        for number, node in enumerate(order):
            torch.manual_seed(int(node.attribute("draw") or 0))
            known[node] = list(run(node, known, wide=False, portable=False))
            alive = [t for made in known.values() for t in made if t is not None]
            held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
            most = max(most, sum(held.values()))
            for value in {*node.inputs, *(node.value(index) for index in range(len(node.outputs)))} - kept:
                if last.get(value, -1) <= number:
                    known[value.node][value.index] = None
    return most


def small_bert():
    module, inputs = bert(layers=2, width=64, heads=4, tokens=64, batch=8)
    loss = lambda output: output[0].pow(3).sum()  # noqa: E731  a sum alone has no gradient through a norm
    return trace(module, inputs, training=True, optimizer=None, loss=loss).flow


def test_every_weight_has_a_gradient_also_where_backward_looks_at_it_again():
    flow = traced(lambda m, x: m.b(m.a(x).relu()), torch.randn(5, 4), training=True, options={"optimizer": None},
                  a=nn.Linear(4, 4), b=nn.Linear(4, 4)).flow  # fmt: skip
    weights = {f"{name}.{kind}.grad" for name in "ab" for kind in ("weight", "bias")}
    assert {name for name in flow.names if name.endswith(".grad")} == weights
    assert sum(node.op == "mm" for node in flow.order) == 3  # one gradient of an input, two of weights


@pytest.mark.slow
def test_memory_of_bert_in_training_falls_as_a_run_shows():
    flow = small_bert()
    by_time, by_memory = (apply_passes(flow, H100, objective=each).after for each in ("time", "memory"))
    claimed = [Liveness(each.program()).peak().size_bytes for each in (flow, by_time, by_memory)]
    real = [peak_of_a_run(each) for each in (flow, by_time, by_memory)]
    for said, seen in zip(claimed, real, strict=True):
        assert said == pytest.approx(seen, rel=0.02)
    assert real[2] < 0.9 * min(real[:2])
    assert check(flow, by_memory).passed


def test_what_is_recomputed_is_read_through_views_and_only_late():
    def f(m, x):
        for _ in range(3):
            x = m.b(F.gelu(m.a(x)))  # kept for the gradient of b alone, which reads it through views
        return x.sum()

    flow = traced(f, torch.randn(4, 32, 8), training=True, options={"optimizer": None}, a=nn.Linear(8, 64),
                  b=nn.Linear(64, 8)).flow  # fmt: skip
    found = apply_passes(flow, H100, objective="memory")
    phases = [found.after.place(node).phase for node in found.after.order if node.op == "gelu"]
    assert phases == ["forward"] * 3 + ["backward"] * 2  # the last one is at the peak whatever is done
    assert check(flow, found.after).passed
    kept = [s for s in found.after.program().storages if s.category == "activation" and s.size_bytes == 4 * 4 * 32 * 64]
    assert len(kept) == 4  # what goes into each GELU, and what comes out of the last; before, of each
