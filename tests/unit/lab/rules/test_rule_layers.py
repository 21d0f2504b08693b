"""Each layer of a certificate closes on right rules and fails on wrong ones, which are right rules with one change."""

from __future__ import annotations

import pytest

from steptime.errors import UserError
from steptime_lab.rules.certify import certified, checked
from steptime_lab.rules.declared import rule_of
from steptime_lab.rules.rule import Rule
from steptime_lab.rules.store import axioms
from steptime_lab.rules.verify_egraph import proved_together
from steptime_lab.rules.verify_exact import proved_exactly
from steptime_lab.rules.verify_generic import proved_generically
from steptime_lab.rules.verify_random import Counterexample, fuzzed

CONV = "conv[1, 1, 1, 1]"
IMAGES = "x[n, c, h, w] y[n, d, h, w] u[o, c, r, s] v[o, d, r, s]"
GROUPS = "x[n, 2*c, h, w] u[2*o, c, r, s] v[2*q, c, r, s]"
#: Variables, source, the right target, a wrong one.
PAIRS = (
    ("x[m,k] y[k,l] z[l,n]", "matmul(matmul(x, y), z)", "matmul(x, matmul(y, z))", "matmul(matmul(x, y), neg(z))"),
    ("x[n,n] y[n,n]", "transpose[-1, -2](matmul(x, y))", "matmul(transpose[-1, -2](y), transpose[-1, -2](x))",
     "matmul(transpose[-1, -2](x), transpose[-1, -2](y))"),
    ("x[m,k] w[k,n] v[k,n]", "concat[-1](matmul(x, w), matmul(x, v))", "matmul(x, concat[-1](w, v))",
     "matmul(x, concat[-1](v, w))"),
    ("x[m,n] y[m,n]", "relu(concat[-1](x, y))", "concat[-1](relu(x), relu(y))", "concat[-1](relu(x), y)"),
    ("x[m,n]", "concat[-1](slice[-1, 0, 2](x), slice[-1, 2, n](x))", "x", "relu(x)"),
    (IMAGES, f"add({CONV}(x, u), {CONV}(y, v))", f"{CONV}(concat[-3](x, y), concat[-3](u, v))",
     f"{CONV}(concat[-3](x, y), concat[-3](neg(u), v))"),
    ("x[n,c,h,w] u[o,c,1,1]", "conv[1, 0, 1, 1](x, u)", "conv[1, 1, 1, 1](x, enlarge[1](u))",
     "conv[1, 1, 1, 1](x, neg(enlarge[1](u)))"),
    (GROUPS, "conv[1, 0, 1, 2](x, add(u, u))", "scale[2](conv[1, 0, 1, 2](x, u))", "scale[3](conv[1, 0, 1, 2](x, u))"),
    ("x[m,n] c[m,1]", "softmax[-1](add(x, c))", "softmax[-1](x)", "add(softmax[-1](x), c)"),
    ("x[m,n] y[m,n]", "exp(add(x, y))", "mul(exp(x), exp(y))", "add(exp(x), exp(y))"),
    ("x[m,k] y[m,l]", "max[-1](concat[-1](x, y))", "maximum(max[-1](x), max[-1](y))", "max[-1](x)"),
    ("x[m,k] y[m,l]", "sum[-1](concat[-1](x, y))", "add(sum[-1](x), sum[-1](y))", "add(sum[-1](x), max[-1](y))"),
    ("x[m,n]", "mean[-1](x)", "mean[-1](x)", "sum[-1](x)"),
    ("x[n,c,h,w] y[n,d,h,w]", "maxpool[3, 2, 1](concat[-3](x, y))",
     "concat[-3](maxpool[3, 2, 1](x), maxpool[3, 2, 1](y))", "concat[-3](maxpool[3, 2, 1](x), avgpool[3, 2, 1](y))"),
    ("x[a,b,c] w[c,d]", "reshape[a*b, d](matmul(x, w))", "matmul(reshape[a*b, c](x), w)",
     "matmul(reshape[a*b, c](neg(x)), w)"),
)  # fmt: skip
PROVED = [
    rule for rule in axioms() if rule.name.split("-")[0] in ("matmul", "transpose", "concat", "slices", "conv", "sum")
]


@pytest.mark.quick(every=3)
@pytest.mark.each("variables, source, right, wrong", PAIRS)
def test_three_layers_close_on_right_rules_and_fail_on_wrong_ones(
    variables: str, source: str, right: str, wrong: str
) -> None:
    good, bad = (rule_of("r", variables, source, target) for target in (right, wrong))
    assert fuzzed(good) == 50
    assert (proved_exactly(good) or 0) >= 1
    assert proved_generically(good)
    assert isinstance(fuzzed(bad), Counterexample)
    assert proved_exactly(bad) is None
    assert not proved_generically(bad)


@pytest.mark.slow
def test_the_egraph_proves_right_rules_and_no_wrong_one() -> None:
    pairs = PAIRS[:6]
    rules = [rule_of("r", v, s, t) for v, s, right, wrong in pairs for t in (right, wrong)]
    found = proved_together(rules, PROVED)
    assert found[1::2] == [False] * len(pairs)
    assert found[::2].count(True) >= 5


def test_the_egraph_heeds_shapes() -> None:
    square = rule_of("square", "x[n, n] y[n, n]", "matmul(x, y)", "matmul(y, x)")
    wide = rule_of("wide", "a[n, n] b[n, n]", "matmul(a, b)", "matmul(b, a)")
    row = rule_of("row", "x[1, n] y[n, n]", "add(matmul(x, y), matmul(x, y))", "matmul(x, add(y, y))")
    narrow = rule_of("narrow", "x[1, k] y[k, n]", "matmul(x, y)", "matmul(relu(x), y)")
    assert proved_together([wide], [square]) == [True]
    assert proved_together([rule_of("r", "a[m, n] b[n, m]", "add(matmul(a, b), matmul(a, b))",
                                    "add(matmul(a, b), matmul(relu(a), b))")], [narrow]) == [False]  # fmt: skip
    assert proved_together([row], PROVED) == [True]


def test_what_holds_for_special_sizes_alone_is_unsound() -> None:
    rule = rule_of("square", "x[m, n] y[n, m]", "sum[-1](sum[-2](matmul(x, y)))", "sum[-1](sum[-2](matmul(x, y)))")
    assert fuzzed(rule) == 50
    ones = rule_of("ones", "x[m, n]", "sum[-1](x)", "max[-1](x)")
    found = fuzzed(ones)
    assert isinstance(found, Counterexample) and found.sizes["n"] > 1


def test_the_grouped_convolution_is_found_where_shapes_allow_it() -> None:
    source, target = "concat[-3](conv[1,0,1,g](x, u), conv[1,0,1,g](x, v))", "conv[1,0,1,g](x, concat[-4](u, v))"
    shapes = "x[n, {0}*c, h, w] u[{0}*o, c, r, s] v[{0}*q, c, r, s]"
    single = rule_of("one", shapes.format(1), source.replace("g", "1"), target.replace("g", "1"))
    several = rule_of("many", shapes.format("g"), source, target)
    assert checked(single).word == "proved"
    verdict = checked(several)
    assert verdict.word == "unsound" and verdict.counterexample is not None
    assert verdict.counterexample.sizes["g"] > 1
    assert verdict.counterexample.source != verdict.counterexample.target
    assert "shapes x" in str(verdict.counterexample)


def test_a_rule_without_a_general_proof_is_open() -> None:
    # Square sizes of several products of names: tests hold, and neither general proof reaches it.
    rule = rule_of("idle", "x[m, n]", "max[-1](add(x, max[-1](x)))", "add(max[-1](x), max[-1](x))")
    (verdict,) = certified([rule], [])
    assert verdict.word in ("open", "unsound")


def test_sides_that_fit_nowhere_are_refused() -> None:
    with pytest.raises(UserError, match=r"do not fit|no sizes fulfil"):
        checked(rule_of("never", "x[m, n]", "matmul(x, concat[-2](x, x))", "slice[-1, 0, n + n + 1](x)"))


def test_certificates_tell_whether_a_rule_may_be_shipped() -> None:
    from steptime_lab.rules.rule import Certificate

    assert Certificate(random=50, exact=1, generic=True).complete
    assert Certificate(random=50, exact=1, egraph=True).complete
    assert not Certificate(random=50, exact=1).complete
    assert not Certificate(random=49, exact=1, generic=True).complete
    assert not Certificate(random=50, exact=0, generic=True).complete


def test_declared_rules_are_all_proved_for_all_sizes() -> None:
    rules: list[Rule] = axioms()
    assert len({rule.name for rule in rules}) == len(rules) > 250
    sample = rules[::9]
    assert [rule.name for rule in sample if not proved_generically(rule)] == []
    assert [rule.name for rule in sample if fuzzed(rule, 20) != 20] == []


def test_the_egraph_heeds_leading_dims() -> None:
    (axiom,) = (rule for rule in axioms() if rule.name == "slice-add-axis1")
    sides = "slice[-1, c, d](add(x, y))", "add(slice[-1, c, d](x), slice[-1, c, d](y))"
    alike = rule_of("alike", "x[b, m, n] y[b, m, n]", *sides)
    unlike = rule_of("unlike", "x[b, m, n] y[1, m, n]", *sides)
    assert proved_together([alike, unlike], [axiom]) == [True, False]
