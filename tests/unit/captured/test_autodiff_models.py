"""Derived backward passes of whole models are PyTorch's: gradients, FLOPs, and bytes saved by the forward pass."""

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from aten_interpreter import Tracer, evaluate  # noqa: E402
from models import FACTORIES, loss_of  # noqa: E402
from steptime.captured.autodiff import gradients  # noqa: E402
from steptime.captured.graph import Graph  # noqa: E402
from steptime.captured.graph.schedule import program_of  # noqa: E402

#: Bytes that PyTorch keeps and the derived backward pass does not, with the reason; negative: the other way round.
DIFFERENCES = {
    "gpt": 16,  # the tokens are a slice of a longer storage
    "llama": 16,  # the same
    "gpt_eager": 16 + 1024,  # and two blocks make the same mask: equal nodes are one
    "lstm": 4096,  # the initial state and the initial cell are the same zeros
    "gru": -49152,  # PyTorch computes gates over one another in place, a graph is pure
    "moe": 4 * 32768 + 1024,  # sources of index_copy and index_add are kept for their shapes; equal row numbers are one
}


class Recorded:
    """One forward and backward pass of a module in float64, recorded and differentiated."""

    def __init__(self, name):
        torch.manual_seed(0)
        module, inputs = FACTORIES[name]()
        module = module.double().train()
        inputs = [each.double() if each.is_floating_point() else each for each in inputs]
        self.tracer, self.parameters, self.kept = Tracer(), dict(module.named_parameters()), {}
        for n, parameter in self.parameters.items():
            self.tracer.source("parameter", n, parameter)
        for n, buffer in module.named_buffers():
            self.tracer.source("buffer", n, buffer)
        for n, each in enumerate(inputs):
            self.tracer.source("input", f"input{n}", each)
        with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor), self.tracer:
            self.loss = loss_of(_double(module(*inputs)))
        own = {each.untyped_storage()._cdata for each in (*module.parameters(), *module.buffers())}
        self.saved_bytes = sum(size for key, size in self.kept.items() if key not in own)
        self.output = self.tracer.values[id(self.loss)]
        self.derived = gradients(self.tracer.nodes, Graph((self.output,)))

    def keep(self, tensor):
        self.tracer.kept.append(tensor)
        self.kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    def run(self, values):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            results = evaluate(values, self.tracer.sources, self.tracer.drawn)
        return results, counter.get_total_flops()


def _double(output):
    return [each.double() for each in output] if isinstance(output, (tuple, list)) else output.double()


@pytest.mark.each("name", FACTORIES)
def test_gradients_flops_and_saved_bytes(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    recorded = Recorded(name)
    names, parameters = zip(*recorded.parameters.items(), strict=True)
    with FlopCounterMode(display=False) as counter:
        theirs = torch.autograd.grad(recorded.loss, parameters, allow_unused=True)
    results, flops = recorded.run(list(recorded.derived.wanted.values()))
    ours = {value.node.attribute("name"): got for value, got in zip(recorded.derived.wanted, results, strict=True)}
    largest = max(float(grad.abs().max()) for grad in theirs if grad is not None)
    for key, grad in zip(names, theirs, strict=True):
        assert (grad is None) == (key not in ours), key
        if grad is not None:
            torch.testing.assert_close(ours[key], grad, rtol=1e-9, atol=1e-12 * largest)
    assert flops - recorded.run([recorded.output])[1] == counter.get_total_flops() > 0
    assert recorded.derived.saved_bytes + DIFFERENCES.get(name, 0) == recorded.saved_bytes


def test_a_training_program_keeps_what_the_backward_reads():
    derived = Recorded("mlp").derived
    program = program_of(derived.forward, backward=derived.backward, gradients=derived.wanted)
    activations = [s for s in program.storages if s.category == "activation"]
    inputs = sum(s.size_bytes for s in program.storages if s.category == "input")
    # The loss itself, 8 bytes, lives into the backward pass in no storage that is read.
    assert sum(s.size_bytes for s in activations) + inputs == derived.saved_bytes
    gradients_bytes = sum(s.size_bytes for s in program.storages if s.category == "gradient")
    assert gradients_bytes == sum(parameter.size_bytes for parameter in program.parameters)
    assert all(s.freed is None for s in program.storages if s.category in ("parameter", "gradient"))
    alive = inference_peak(program_of(derived.forward))
    assert alive < inference_peak(program)


def inference_peak(program):
    """Most bytes alive during one call, counted call by call."""
    return max(
        sum(s.size_bytes for s in program.storages if s.born <= n and (s.freed is None or s.freed >= n))
        for n in range(len(program.calls))
    )
