"""Sizes, terms, matching and rewriting of substitutions, with results worked out by hand."""

from __future__ import annotations

import pytest

from steptime.errors import UserError
from steptime_lab.rules.certify import siblings
from steptime_lab.rules.declared import condition_of, rule_of, variables_of
from steptime_lab.rules.picture import drawn, svg
from steptime_lab.rules.rule import applied_to, assignments, matches, rewrites, unified
from steptime_lab.rules.sizes import size
from steptime_lab.rules.terms import order, parsed, shape_of

QKV = ("qkv", "x[m, k] w![k, n] v![k, l]", "concat[-1](matmul(x, w), matmul(x, v))", "matmul(x, concat[-1](w, v))")
HALVES = ("halves", "x[m, n]", "concat[-1](slice[-1, 0, a](x), slice[-1, a, n](x))", "x", "a < n, a >= 1")


def test_sizes_are_polynomials_with_exact_quotients() -> None:
    assert str(size("2*(n + 1)//2")) == "n+1"
    assert str(size("(h + 1)//2")) == "(h+1)//(2)"
    assert size("(h + 2*p - (2*p + 1 - 1) - 1)//1 + 1") == size("h")
    assert size("a*b - b*a") == size(0)
    assert size("(h + 1)//2").value({"h": 4}) == 2


def test_equal_terms_are_one_object() -> None:
    text = "add(matmul(x, y), relu(matmul(x, y)))"
    assert parsed(text) is parsed(text)
    assert parsed(text).children[0] is parsed(text).children[1].children[0]
    assert parsed(text).operators == 4


def test_shapes_and_what_operators_need() -> None:
    table = {v.name: v for v in variables_of("x[n, 2*c, h, h] u[o, c, 3, 3]")}
    needs: list[object] = []
    found = shape_of(parsed("conv[2, 1, 1, 2](x, u)"), table, {}, needs)  # type: ignore[arg-type]
    assert [str(each) for each in found] == ["n", "o", "(h-1)//(2)+1", "(h-1)//(2)+1"]
    assert "o-2*(o)//(2) == 0" in list(map(str, needs))


@pytest.mark.each(
    "text, message",
    [
        ("matmul(x", "is no term"),
        ("unknown(x)", "unknown"),
        ("matmul(x)", "1 arguments"),
        ("softmax(x)", "0 attributes"),
        ("x.y", "is no term"),
        ("add(x, y=z)", "is no term"),
        ("__import__('os')", "__import__"),
        ("slice[-1, 0, n**9](x)", "is no size"),
        ("(" * 5000 + "x" + ")" * 5000, "is no term"),
    ],
)
def test_what_is_no_term_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parsed(text)


def test_a_rule_matches_and_rewrites_inside_a_term() -> None:
    rule = rule_of(*QKV)
    table = {v.name: v for v in variables_of("t[32, 8] q![8, 3] k![8, 5] a[8, 3]")}
    term = parsed("relu(concat[-1](matmul(t, q), matmul(t, k)))")
    assert [str(each) for each in rewrites(rule, term, table)] == ["relu(matmul(t, concat[-1](q, k)))"]
    unweighted = parsed("concat[-1](matmul(t, a), matmul(t, k))")
    assert applied_to(rule, (unweighted,), table) is None, "a is no weight"
    assert applied_to(rule, (parsed("concat[-2](matmul(t, q), matmul(t, k))"),), table) is None


def test_leading_dims_and_broadcasting_are_matched_where_a_rule_allows_them() -> None:
    product = rule_of("t", "x[m, k] y[k, n]", "transpose[-1, -2](matmul(x, y))",
                      "matmul(transpose[-1, -2](y), transpose[-1, -2](x))")  # fmt: skip
    table = {v.name: v for v in variables_of("a[9, 7, 2, 3] b[9, 7, 3, 4] c[3, 4] d[2, 3] r[1, 3]")}
    batched = applied_to(product, (parsed("transpose[-1, -2](matmul(a, b))"),), table)
    assert [str(each) for each in batched or ()] == ["matmul(transpose[-1, -2](b), transpose[-1, -2](a))"]
    assert applied_to(product, (parsed("transpose[-1, -2](matmul(a, c))"),), table) is None, "only a has leading dims"
    total = rule_of("c", "x[m, n] y[m, n]", "add(x, y)", "add(y, x)")
    assert applied_to(total, (parsed("add(d, r)"),), table) == (parsed("add(r, d)"),)
    slices = rule_of(
        "s", "x[m, n] y[m, n]", "slice[-1, a, b](add(x, y))", "add(slice[-1, a, b](x), slice[-1, a, b](y))"
    )
    assert applied_to(slices, (parsed("slice[-1, 0, 2](add(d, r))"),), table) is None, "a row is not cut alike"


def test_conditions_decide_a_match() -> None:
    rule = rule_of(*HALVES)
    table = {v.name: v for v in variables_of("t[4, 6]")}
    good = matches(rule, (parsed("concat[-1](slice[-1, 0, 2](t), slice[-1, 2, 6](t))"),), table)
    assert good is not None and str(good.sizes["a"]) == "2"
    assert matches(rule, (parsed("concat[-1](slice[-1, 0, 2](t), slice[-1, 3, 6](t))"),), table) is None
    assert matches(rule, (parsed("concat[-1](slice[-1, 0, 2](t), slice[-1, 2, 5](t))"),), table) is None


def test_sizes_are_unified_where_shapes_have_to_be_equal() -> None:
    rule = unified(rule_of("r", "x[a, b] y[c, d] z[e, f]", "matmul(matmul(x, y), z)", "matmul(x, matmul(y, z))"))
    assert rule is not None and rule.needs() == []
    x, y, z = rule.variables
    assert x.dims[1] == y.dims[0] and y.dims[1] == z.dims[0] and len(rule.names) == 4


def test_assignments_keep_conditions() -> None:
    rule = rule_of("g", "x[n, g*c, h, w] u[g*o, c, r, s]", "conv[1, 0, 1, g](x, u)", "conv[1, 0, 1, g](x, u)")
    found = list(assignments(rule, 50, 3))
    assert len(found) == 50 == len({tuple(at.items()) for at in found})
    assert all(at["h"] >= at["r"] and at["w"] >= at["s"] for at in found)
    assert any(at["g"] > 1 for at in found)


def test_siblings_merge_into_slices() -> None:
    merged = siblings(rule_of(*QKV))
    assert merged is not None
    assert merged.equation() == (
        "matmul(x, w); matmul(x, v) = slice[-1, 0, n](matmul(x, concat[-1](w, v))); "
        "slice[-1, n, l+n](matmul(x, concat[-1](w, v)))"
    )
    assert siblings(rule_of(*HALVES)) is None


def test_the_order_is_kept_by_contexts() -> None:
    small, large = parsed("relu(x)"), parsed("transpose[-1, -2](x)")
    assert order(small) < order(large)
    assert order(parsed("add(relu(x), y)")) < order(parsed("add(transpose[-1, -2](x), y)"))


def test_conditions_are_read() -> None:
    assert condition_of("2*a <= n").holds({"a": 2, "n": 4}) and not condition_of("2*a < n").holds({"a": 2, "n": 4})
    with pytest.raises(UserError, match="condition"):
        condition_of("a is odd")


def test_pictures_show_both_sides() -> None:
    text = drawn(rule_of(*QKV))
    assert text.splitlines()[0].split() == ["concat[-1]", "matmul"]
    assert "w![k, n]" in text and "=>" in text
    image = svg(rule_of(*QKV))
    assert image.count("<rect") == 6 + 5 and image.count("matmul") >= 3
