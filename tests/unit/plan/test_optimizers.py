"""States and operations of optimisers, against PyTorch's and against the papers' algorithms run on small matrices."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from steptime import api  # noqa: E402
from steptime.cost.optimizers import QR, newton_schulz_flops, soap_flops  # noqa: E402
from steptime.plan.optimizers import OPTIMIZERS  # noqa: E402

ROWS, COLUMNS = 48, 80


def bytes_of(state):
    """Bytes of tensors that are no counters."""
    return sum(t.numel() * t.element_size() for t in state.values() if torch.is_tensor(t) and t.numel() > 1)


def expected(name, shape=(ROWS, COLUMNS)):
    """States of one matrix of a layer."""
    row = OPTIMIZERS[name]
    count = shape[0] * shape[1]
    if row.matrices is None:
        return row.state_bytes * count
    return row.matrices.element_bytes * count + row.matrices.state_bytes(*shape)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("momentum", lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("adafactor", torch.optim.Adafactor),
        ("muon", torch.optim.Muon),
    ],
)
def test_states_are_those_of_pytorch(name, made):
    weight = torch.nn.Parameter(torch.randn(ROWS, COLUMNS))
    optimizer = made([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert bytes_of(optimizer.state[weight]) == expected(name)


def lion(w, g, s):
    """arXiv 2302.06675, algorithm 2."""
    m = s.setdefault("m", torch.zeros_like(w))
    w -= 0.01 * torch.sign(0.9 * m + 0.1 * g)
    m.mul_(0.99).add_(0.01 * g)


def ademamix(w, g, s):
    """arXiv 2409.03137, algorithm 1, without warm-up."""
    m, slow, v = (s.setdefault(name, torch.zeros_like(w)) for name in ("m", "slow", "v"))
    m.mul_(0.9).add_(0.1 * g)
    slow.mul_(0.9999).add_(0.0001 * g)
    v.mul_(0.99).add_(0.01 * g * g)
    w -= 0.01 * (m + 5 * slow) / (v.sqrt() + 1e-8)


def schedule_free(w, g, s):
    """arXiv 2405.15682, section 4.4: the weights are y; x follows from y and z."""
    z, v = s.setdefault("z", w.clone()), s.setdefault("v", torch.zeros_like(w))
    t = s["t"] = s.get("t", 0) + 1
    x = (w - 0.1 * z) / 0.9
    v.mul_(0.99).add_(0.01 * g * g)
    z -= 0.03 * g / (v.sqrt() + 1e-8)
    x = x + (z - x) / t
    w.copy_(0.9 * x + 0.1 * z)


def soap(w, g, s):
    """arXiv 2409.11321, algorithm 3, with a new basis in every step."""
    m, n = w.shape
    names = (("left", m), ("right", n))
    left, right = (s.setdefault(name, torch.zeros(side, side)) for name, side in names)
    ql, qr = (s.setdefault(f"q_{name}", torch.eye(side)) for name, side in names)
    first, second = (s.setdefault(name, torch.zeros_like(w)) for name in ("first", "second"))
    first.mul_(0.9).add_(0.1 * g)
    turned, momentum = ql.T @ g @ qr, ql.T @ first @ qr
    second.mul_(0.95).add_(0.05 * turned * turned)
    w -= 0.01 * ql @ (momentum / (second.sqrt() + 1e-8)) @ qr.T
    left.mul_(0.95).add_(0.05 * (g @ g.T))
    right.mul_(0.95).add_(0.05 * (g.T @ g))
    ql.copy_(torch.linalg.qr(left @ ql).Q)
    qr.copy_(torch.linalg.qr(right @ qr).Q)


def shampoo(w, g, s):
    """arXiv 1802.09568, algorithm 1, with momentum and kept roots."""
    momentum = s.setdefault("momentum", torch.zeros_like(w))
    roots = []
    for name, side, product in (("left", w.shape[0], g @ g.T), ("right", w.shape[1], g.T @ g)):
        kept = s.setdefault(name, 1e-3 * torch.eye(side))
        kept += product
        values, vectors = torch.linalg.eigh(kept)
        s[f"{name}_root"] = vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T
        roots.append(s[f"{name}_root"])
    momentum.mul_(0.5).add_(roots[0] @ g @ roots[1])
    w -= 0.05 * momentum


@pytest.mark.parametrize("step", [lion, ademamix, schedule_free, soap, shampoo])
def test_states_are_those_of_the_algorithm(step):
    torch.manual_seed(0)
    name = step.__name__.replace("_", "-")
    w, goal, state = torch.zeros(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS), {}
    for _ in range(60):
        step(w, w - goal, state)
    assert ((w - goal).norm() / goal.norm()).item() < 0.9
    assert bytes_of(state) == expected(name)


def test_operations_of_muon_are_those_of_pytorch():
    from torch.optim._muon import _zeropower_via_newtonschulz

    for shape in ((ROWS, COLUMNS), (COLUMNS, ROWS)):
        with FlopCounterMode(display=False) as counter:
            _zeropower_via_newtonschulz(torch.randn(shape), (3.4445, -4.775, 2.0315), 5, 1e-7)
        assert counter.get_total_flops() == newton_schulz_flops(*shape)


def test_operations_of_soap_are_those_of_the_algorithm():
    w, state = torch.zeros(ROWS, COLUMNS), {}
    with FlopCounterMode(display=False) as counter:
        soap(w, torch.randn(ROWS, COLUMNS), state)
    cubes = ROWS**3 + COLUMNS**3
    # Every step makes a basis here, every tenth in the formula; the decomposition is not in the counter.
    assert counter.get_total_flops() == pytest.approx(soap_flops(ROWS, COLUMNS) + (2 - (2 + QR) / 10) * cubes)


def estimated(optimizer, model="llama3-8b", **plan):
    job = {"gpus": 64, "global_batch": 64, "framework": "ideal"}
    return api.estimate(model, "dgx-h100", optimizer=optimizer, plan=plan, **job)


def test_matrices_of_a_model_by_hand():
    found = estimated("muon", zero=1)
    matrices = 32 * (4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096)
    assert found.memory["optimizer/matrices/parameter_bytes"] == pytest.approx((4 + 4) * matrices / 64)
    flops = 32 * sum(newton_schulz_flops(*s) for s in ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)))
    alone = estimated("muon", zero=0)
    assert alone.time["optimizer/matrix_update_s"] == pytest.approx(64 * found.time["optimizer/matrix_update_s"])
    rate = flops / alone.time["optimizer/matrix_update_s"]
    assert 0.5 * 989e12 < rate < 989e12
    assert not any("momentum" in name for name in alone.time) and any("momentum" in name for name in found.time)


@pytest.mark.parametrize("name", ["muon", "soap", "shampoo", "adafactor", "lion"])
def test_experts_are_counted_and_terms_add_up(name):
    found = estimated(name, "mixtral-8x7b", ep=8, zero=1)
    assert found.time.total == pytest.approx(found.step_time_s)
    has = any(path.startswith("expert_optimizer/matrices") for path in found.memory)
    assert has == (OPTIMIZERS[name].matrices is not None)


def test_a_matrix_is_not_updated_on_the_host():
    with pytest.raises(Exception, match="whole matrices"):
        estimated("muon", offload="optimizer")


def test_searches_take_them():
    job = {"gpus": 64, "global_batch": 256, "optimizer": "muon"}
    best = api.plan("llama3-8b", "dgx-h100", **job).plans[0]
    assert any(path.startswith("optimizer/matrix_update_s") for path in best.time)
