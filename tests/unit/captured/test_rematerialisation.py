"""A schedule's bytes and seconds are those counted by hand; the chain solver equals closed forms."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from steptime.captured.rematerialisation.chain import (
    Action,
    Chain,
    Infeasible,
    Kind,
    Schedule,
    ScheduleError,
    Segment,
    Solution,
    keep_all,
    simulate,
)
from steptime.captured.rematerialisation.rotor import SLOTS, fill, front, solve
from steptime.errors import FieldError, UserError

ONE = Segment(
    forward_s=1, backward_s=2, input_bytes=10, saved_bytes=30, gradient_bytes=7, forward_transient_bytes=4,
    saving_transient_bytes=2, backward_transient_bytes=5,
)  # fmt: skip
THREE = Chain(segments=(ONE,) * 3, output_bytes=6, output_gradient_bytes=3)


def parse(text: str) -> Schedule:
    kinds = sorted(Kind, key=len, reverse=True)
    words = [(next(k for k in kinds if word.startswith(k)), word) for word in text.split()]
    return tuple(Action(kind, int(word.removeprefix(kind))) for kind, word in words)


def unequal(count: int, seed: int = 0) -> Chain:
    draw = np.random.default_rng(seed).uniform
    segments = [
        Segment(
            forward_s=draw(0.5, 1.5), backward_s=draw(1, 3), input_bytes=draw(1, 3), saved_bytes=draw(10, 40),
            gradient_bytes=draw(1, 3), forward_transient_bytes=draw(5, 10), saving_transient_bytes=draw(0, 1),
            backward_transient_bytes=draw(5, 10),
        )
        for _ in range(count)
    ]  # fmt: skip
    return Chain(segments=tuple(segments), output_bytes=1.0, output_gradient_bytes=1.0)


# ---- the simulator ----


def test_every_action_has_the_peak_counted_by_hand():
    run = simulate(THREE, parse("Fck0 Fn1 Fall2 B2 Fall0 Fall1 B1 B0"))
    assert run.action_bytes == (
        10 + 10 + 4,  # input, output, transient
        20 + 10 + 4,
        20 + 6 + 30 + 2,  # a0, a2; output, saved, transient
        20 + 30 + 3 + 7 + 5,  # a0, a2, saved; gradients of output and input, transient; the output is gone
        10 + 7 + 10 + 30 + 2,  # a0 and a gradient
        10 + 7 + 10 + 30 + 10 + 30 + 2,
        20 + 60 + 7 + 7 + 5,
        10 + 30 + 7 + 7 + 5,
    )
    assert run.peak_bytes == 99
    assert (run.time_s, run.recomputed_forward_s, run.forward_runs) == (11, 2, (2, 2, 1))


def test_an_output_that_the_backward_reads_stays_as_long_as_what_it_saved():
    reads = replace(ONE, output_in_backward=True)
    chain = Chain(segments=(reads, ONE), output_bytes=6, output_gradient_bytes=3)
    schedule = parse("Fall0 Fall1 B1 B0")
    plain = simulate(Chain(segments=(ONE, ONE), output_bytes=6, output_gradient_bytes=3), schedule)
    assert [a - b for a, b in zip(simulate(chain, schedule).action_bytes, plain.action_bytes, strict=True)] == [
        0, 0, 0, 10,
    ]  # fmt: skip


def test_the_last_output_stays_through_its_backward_only_where_that_reads_it():
    reads = Chain(segments=(replace(ONE, output_in_backward=True),), output_bytes=6, output_gradient_bytes=3)
    plain = Chain(segments=(ONE,), output_bytes=6, output_gradient_bytes=3)
    assert simulate(reads, keep_all(1)).action_bytes[1] == 10 + 30 + 3 + 7 + 5 + 6
    assert simulate(plain, keep_all(1)).action_bytes[1] == 10 + 30 + 3 + 7 + 5


def test_a_copy_of_an_output_lives_only_during_the_run():
    run = simulate(THREE, parse("Fck0 Fck1 Fck0 Fn1 Fall2 B2 Fall0 Fall1 B1 B0"))
    assert run.action_bytes[2:5] == (30 + 10 + 4, 30 + 10 + 4, 20 + 6 + 30 + 2)


def test_a_discarded_checkpoint_is_made_again():
    run = simulate(THREE, parse("Fck0 Fck1 Fall2 D1 B2 Fall0 Fall1 B1 B0"))
    assert run.action_bytes[4] == 20 + 30 + 3 + 7 + 5
    assert run.peak_bytes == 99


def test_saved_activations_hold_their_input():
    run = simulate(THREE, parse("Fall0 Fall1 Fn1 Fall2 B2 B1 B0"))
    assert run.action_bytes[3] == 10 + 30 + 10 + 30 + 10 + 6 + 30 + 2


@pytest.mark.each(
    ("text", "position", "problem"),
    [
        ("Fn1", 0, "activation 1 is not in memory"),
        ("Fck0 Fn1 Fall1", 2, "activation 1 is not in memory"),
        ("Fall0 Fall1 Fall2 B1", 3, "gradient of activation 2 is not in memory"),
        ("Fck0 Fck1 Fck2 B2", 3, "was not saved"),
        ("Fall0 Fall0", 1, "in memory already"),
        ("Fall0 Fall1 Fall2 B2 B1", 5, "ends before the backward"),
        ("D0", 0, "must stay"),
        ("Fall0 Fall1 D1", 2, "must stay"),
        ("Fall3", 0, "there is no segment 3"),
    ],
)
def test_an_illegal_schedule_is_refused_at_its_first_wrong_action(text, position, problem):
    with pytest.raises(ScheduleError, match=problem) as error:
        simulate(THREE, parse(text))
    assert error.value.position == position
    assert isinstance(error.value, UserError)


# ---- input ----


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "3", None])
def test_a_number_that_cannot_be_is_refused_with_its_field(value):
    with pytest.raises(FieldError, match="saved_bytes"):
        replace(ONE, saved_bytes=value)
    with pytest.raises(FieldError, match="output_bytes"):
        replace(THREE, output_bytes=value)


def test_an_empty_chain_is_refused():
    with pytest.raises(FieldError, match="segments: is empty"):
        Chain(segments=())


@pytest.mark.parametrize("limit", [-1, math.nan, "1 GiB"])
def test_a_limit_that_is_no_limit_is_refused(limit):
    for solver in (solve, lambda chain, given: fill(chain, limit_bytes=given), lambda c, given: fill(c).best(given)):
        with pytest.raises(FieldError, match="limit_bytes"):
            solver(THREE, limit)


@pytest.mark.parametrize("slots", [9, 50.0, True])
def test_slots_that_are_no_count_are_refused(slots):
    with pytest.raises(FieldError, match="slots"):
        solve(THREE, 99, slots=slots)


# ---- the chain solver ----


def revolve_runs(steps: int, checkpoints: int) -> int:
    """Forward runs that bring ``steps`` steps back with so many checkpoints, the first input among them: r l -
    C(c + r, r - 1) advances with the least r that C(c + r, c) reaches l, and one saving run per step. (Griewank and
    Walther, Algorithm 799, 2000. The current step's input comes on top of the checkpoints.)"""
    r = next(r for r in itertools.count() if math.comb(checkpoints + r, checkpoints) >= steps)
    return r * steps - (math.comb(checkpoints + r, r - 1) if r else 0) + steps


@pytest.mark.each("checkpoints", [1, 2, 3, 5])
@pytest.mark.each("steps", [1, 2, 5, 6, 11, 20])
def test_equal_steps_that_cannot_be_saved_in_pairs_need_the_binomial_number_of_runs(steps, checkpoints):
    one = Segment(forward_s=1, backward_s=0, input_bytes=1, saved_bytes=50)
    found = solve(Chain(segments=(one,) * steps, output_bytes=1), checkpoints + 52)
    assert isinstance(found, Solution)
    assert sum(found.run.forward_runs) == revolve_runs(steps, checkpoints)


def test_nothing_runs_twice_where_everything_fits():
    for chain in (THREE, unequal(30), Chain(segments=(replace(ONE, saved_bytes=0),) * 40)):
        everything = simulate(chain, keep_all(len(chain))).peak_bytes
        for limit in (everything, math.inf):
            found = solve(chain, limit)
            assert isinstance(found, Solution)
            assert found.time_s == pytest.approx(chain.base_s)
            assert found.run.recomputed_forward_s == 0


def test_too_small_a_limit_gives_the_least_that_would_do():
    for chain in (THREE, unequal(12), unequal(60)):
        found = solve(chain, 20)
        assert isinstance(found, Infeasible)
        assert isinstance(solve(chain, found.least_bytes), Solution)
        assert isinstance(solve(chain, found.least_bytes * (1 - 1e-9)), Infeasible)


def test_a_chain_without_sizes_needs_nothing():
    chain = Chain(segments=(Segment(forward_s=1, backward_s=1, input_bytes=0, saved_bytes=0),) * 3)
    assert solve(chain, 0).time_s == 6
    assert len(front(chain)) == 1


def test_whole_sizes_are_not_rounded_where_the_slots_suffice():
    table = fill(THREE)
    assert (table.exact, table.unit_bytes) == (True, 1)
    scaled = Chain(segments=(replace(ONE, saved_bytes=5e9, input_bytes=1e9),) * 3, output_bytes=1e9)
    assert not fill(scaled).exact
    assert fill(replace(scaled, segments=(Segment(forward_s=1, backward_s=1, input_bytes=1e9, saved_bytes=5e9),))).exact
    assert not fill(unequal(3)).exact


def test_a_table_is_exact_up_to_its_last_slot():
    table = fill(THREE)
    slots = int(table.reach_bytes - THREE.boundary_bytes[0])
    last, beyond = fill(THREE, slots=slots), fill(THREE, slots=slots - 1)
    assert (last.exact, last.unit_bytes, last.costs.slots) == (True, 1, slots)
    assert not beyond.exact and beyond.unit_bytes > 1


@pytest.mark.slow
def test_rounding_to_slots_costs_little():
    chain = unequal(100)
    limit = 0.3 * simulate(chain, keep_all(100)).peak_bytes
    coarse, fine = solve(chain, limit), solve(chain, limit, slots=4 * SLOTS)
    assert isinstance(coarse, Solution)
    assert isinstance(fine, Solution)
    assert coarse.peak_bytes <= limit
    assert coarse.time_s <= fine.time_s * 1.003


@pytest.mark.slow
def test_further_tables_refine_the_low_end_of_the_front():
    chain = unequal(40)
    once, thrice = front(chain), front(chain, tables=3)
    assert once[0].peak_bytes == thrice[0].peak_bytes
    times = [min(p.time_s for p in points if p.peak_bytes <= 1.5 * once[0].peak_bytes) for points in (once, thrice)]
    assert times[1] < times[0] * 0.99


def test_a_long_chain_does_not_recurse_too_deep():
    chain = Chain(segments=(Segment(forward_s=1, backward_s=2, input_bytes=1, saved_bytes=3),) * 1200)
    assert simulate(chain, keep_all(1200)).peak_bytes == 1200 * 4
