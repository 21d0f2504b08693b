"""Every operator three times: its value against PyTorch, its element function against its value, its residues."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from steptime_lab.rules.declared import variables_of
from steptime_lab.rules.domains import FUNCTIONS, FieldPair, Floats, Polynomials, Residues
from steptime_lab.rules.evaluation import evaluated
from steptime_lab.rules.forms import Call, Element, Elements, Form, Piece
from steptime_lab.rules.operators import OPERATORS
from steptime_lab.rules.sizes import Size, size
from steptime_lab.rules.terms import parsed

#: Operator -> a term of it on x, y of these shapes; each operator has at least one.
TERMS = (
    ("x[2, 3] y[2, 3]", "add(x, y)", "torch.add(x, y)"),
    ("x[2, 3] y[1, 3]", "sub(x, y)", "torch.sub(x, y)"),
    ("x[2, 3] y[3]", "mul(x, y)", "torch.mul(x, y)"),
    ("x[2, 3] y[2, 1]", "maximum(x, y)", "torch.maximum(x, y)"),
    ("x[2, 3]", "scale[3](x)", "x * 3"),
    ("x[2, 3] y[3, 4]", "matmul(x, y)", "torch.matmul(x, y)"),
    ("x[2, 3, 4] y[4, 2]", "matmul(x, y)", "torch.matmul(x, y)"),
    ("x[2, 4, 5, 6] y[6, 2, 3, 2]", "conv[2, 1, 1, 2](x, y)", "F.conv2d(x, y, stride=2, padding=1, groups=2)"),
    ("x[1, 2, 6, 5] y[3, 2, 2, 2]", "conv[1, 0, 2, 1](x, y)", "F.conv2d(x, y, dilation=2)"),
    ("x[1, 10, 3, 3] y[5, 2, 1, 1]", "conv[1, 0, 1, 5](x, y)", "F.conv2d(x, y, groups=5)"),
    ("x[1, 2, 5, 4]", "avgpool[3, 2, 1](x)", "F.avg_pool2d(x, 3, 2, 1)"),
    ("x[1, 2, 5, 4]", "maxpool[3, 1, 1](x)", "F.max_pool2d(x, 3, 1, 1)"),
    ("x[1, 1, 4, 4]", "maxpool[2, 2, 0](x)", "F.max_pool2d(x, 2, 2, 0)"),
    ("x[2, 3] y[2, 2]", "concat[-1](x, y, x)", "torch.cat([x, y, x], -1)"),
    ("x[5, 3]", "slice[-2, 1, 4](x)", "x[1:4]"),
    ("x[2, 3]", "pad[-1, 2, 1](x)", "F.pad(x, (2, 1))"),
    ("x[2, 1, 2, 3]", "enlarge[1](x)", "F.pad(x, (1, 1, 1, 1))"),
    ("x[2, 3, 4]", "transpose[-1, -3](x)", "x.transpose(-1, -3)"),
    ("x[2, 3, 4]", "permute[-2, -1, -3](x)", "x.permute(1, 2, 0)"),
    ("x[2, 3, 4]", "reshape[6, 2, 2](x)", "x.reshape(6, 2, 2)"),
    ("x[2, 1]", "expand[-1, 4](x)", "x.expand(2, 4)"),
    ("x[2, 3]", "sum[-1](x)", "x.sum(-1, keepdim=True)"),
    ("x[2, 3]", "mean[-2](x)", "x.mean(-2, keepdim=True)"),
    ("x[2, 3]", "max[-1](x)", "x.amax(-1, keepdim=True)"),
    ("x[2, 3]", "softmax[-1](x)", "x.softmax(-1)"),
    ("x[2, 3]", "add(x, zero[2, 3]())", "x"),
    ("x[2, 3]", "mul(x, one[2, 3]())", "x"),
    ("x[2, 3]", "matmul(x, identity[3]())", "x"),
    ("x[2, 3] y[2, 3]", "relu(concat[-1](x, slice[-1, 1, 3](y)))", "F.relu(torch.cat([x, y[:, 1:3]], -1))"),
    ("x[2, 4]", "max[-1](concat[-2](x, pad[-1, 1, 1](slice[-1, 0, 2](x))))",
     "torch.cat([x, F.pad(x[:, :2], (1, 1))], 0).amax(-1, keepdim=True)"),
    *(("x[2, 3]", f"{name}(x)", f"torch.tensor(FUNCTIONS[{name!r}][1](x.numpy()))") for name in FUNCTIONS),
)  # fmt: skip


def values(declared: str, domain: Any) -> dict[str, Any]:
    shapes = {v.name: tuple(d.value({}) for d in v.dims) for v in variables_of(declared)}
    return {name: domain.random(shape, name, 5) for name, shape in shapes.items()}


def test_every_operator_is_tried() -> None:
    tried = {each.op for _, text, _ in TERMS for each in parsed(text).walk()}
    assert tried - {"var"} == set(OPERATORS)


@pytest.mark.each("declared, text, torch_text", TERMS)
def test_values_are_those_of_torch(declared: str, text: str, torch_text: str) -> None:
    torch = pytest.importorskip("torch")
    given = values(declared, Floats())
    names = {name: torch.tensor(array) for name, array in given.items()}
    expected = eval(torch_text, {"torch": torch, "F": torch.nn.functional, "FUNCTIONS": FUNCTIONS, **names})
    np.testing.assert_allclose(
        evaluated(parsed(text), Floats(), given, {}, {}), expected.numpy(), rtol=1e-12, atol=1e-12
    )


@pytest.mark.each(
    "name, text",
    [(n, f"F.{n}" if n in ("gelu", "silu", "relu") else f"torch.{n}") for n in FUNCTIONS if n not in ("recip", "sqrt")],
)
def test_functions_are_those_of_torch(name: str, text: str) -> None:
    torch = pytest.importorskip("torch")
    x = np.linspace(-2, 2, 9)
    expected = eval(text, {"torch": torch, "F": torch.nn.functional})(torch.tensor(x)).numpy()
    np.testing.assert_allclose(FUNCTIONS[name][1](x), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.each("declared, text, torch_text", TERMS)
def test_elements_are_those_of_the_value(declared: str, text: str, torch_text: str) -> None:
    table = {v.name: v for v in variables_of(declared)}
    given, elements = values(declared, Floats()), Elements(table)
    whole = evaluated(parsed(text), Floats(), given, {}, {})
    dims = elements.dims(parsed(text))
    assert tuple(d.value({}) for d in dims) == whole.shape
    index = tuple(elements.fresh(dim, "i") for dim in dims)
    form = elements.at(parsed(text), index)
    for at in np.ndindex(*whole.shape):
        here = {i.name: value for i, value in zip(index, at, strict=True) if i.name}
        assert number(form, here, elements, given) == pytest.approx(whole[at], rel=1e-12, abs=1e-12), at


def number(form: Form, at: dict[str, int], elements: Elements, given: dict[str, Any]) -> float:
    """The value of a form by its definition: every bound index from zero to below its extent."""
    return sum(v for piece in form for v in every(piece, at, elements, given))


def every(piece: Piece, at: dict[str, int], elements: Elements, given: dict[str, Any]) -> list[float]:
    names = sorted(piece.bounds)
    out = []
    for chosen in product(*(range(elements.ranges[n].value({})) for n in names)):
        here = at | dict(zip(names, chosen, strict=True))
        if all(guard.value(here) >= 0 for guard in piece.guards):
            product_ = float(piece.coefficient.value(here))
            for factor in piece.factors:
                product_ *= factor_number(factor, here, elements, given)
            out.append(product_)
    return out


def factor_number(factor: Element | Call, at: dict[str, int], elements: Elements, given: dict[str, Any]) -> float:
    if isinstance(factor, Element):
        return float(given[factor.name][tuple(i.value(at) for i in factor.index)])
    if factor.function == "max":
        return max(v for piece in factor.of for v in every(piece, at, elements, given))
    if factor.function == "inv":
        return 1 / factor.of[0].coefficient.value(at)
    inner = number(factor.of, at, elements, given)
    return inner if factor.function == "value" else float(FUNCTIONS[factor.function][1](np.float64(inner)))


@pytest.mark.each("declared, text, torch_text", TERMS)
def test_number_systems_agree_on_shapes(declared: str, text: str, torch_text: str) -> None:
    shape = evaluated(parsed(text), Floats(), values(declared, Floats()), {}, {}).shape
    for domain in (Residues(), FieldPair(), Polynomials()):
        out = evaluated(parsed(text), domain, values(declared, domain), {}, {})
        assert out.shape == ((2,) if domain.lead else ()) + shape


def test_exp_of_the_pair_of_fields_turns_sums_into_products() -> None:
    pair = FieldPair()
    a, b = pair.random((5,), "a", 1), pair.random((5,), "b", 1)
    assert pair.same(pair.apply("exp", pair.add(a, b)), pair.mul(pair.apply("exp", a), pair.apply("exp", b)))
    one = pair.mul(a, pair.apply("recip", a))
    assert (one == 1).all()


def test_polynomials_know_what_softmax_keeps() -> None:
    exact = Polynomials()
    given = {"x": exact.random((1, 3), "x", 0), "c": exact.random((1, 1), "c", 0)}
    a = evaluated(parsed("softmax[-1](add(x, c))"), exact, given, {}, {})
    b = evaluated(parsed("softmax[-1](x)"), exact, given, {}, {})
    c = evaluated(parsed("softmax[-1](mul(x, c))"), exact, given, {}, {})
    assert exact.same(a, b) and not exact.same(a, c)


def test_quotients_are_split_where_the_rest_is_small() -> None:
    elements = Elements({})
    i, j = elements.fresh(size("a")), elements.fresh(size("b"))
    whole: Size = i * size("b") + j
    assert elements.quotient(whole, size("b")) == i
    assert elements.quotient(whole * size("c"), size("b*c")) == i
    assert elements.quotient(whole, size("a")) not in (i, j)
