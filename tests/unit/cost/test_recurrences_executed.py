"""Chunked recurrences, run: they return what the recurrence returns token by token, in the counted operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from steptime.cost import recurrence  # noqa: E402

TOKENS, CHUNK, HEADS = 24, 8, 4
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def chunks() -> Iterator[slice]:
    return (slice(at, at + CHUNK) for at in range(0, TOKENS, CHUNK))


def counted(run: object, *given: Tensor) -> tuple[Tensor, int]:
    with FlopCounterMode(display=False) as counter:
        out = run(*given)  # type: ignore[operator]
    return out, counter.get_total_flops()


def state_space(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """x (heads, tokens, width), logarithms of decay (heads, tokens), b and c (groups, tokens, states)."""
    copies, state, out = x.shape[0] // b.shape[0], x.new_zeros(x.shape[0], b.shape[2], x.shape[2]), []
    for here in chunks():
        total = decay[:, here].cumsum(1)
        pairs = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
        scores = torch.bmm(c[:, here], b[:, here].transpose(1, 2)).repeat_interleave(copies, 0)
        ins, outs = (each[:, here].repeat_interleave(copies, 0) for each in (b, c))
        own = torch.bmm(scores * pairs, x[:, here])
        out.append(own + torch.bmm(outs * total.exp()[..., None], state))
        left = (total[:, -1:] - total).exp()[..., None]
        state = total[:, -1].exp()[:, None, None] * state + torch.bmm((ins * left).transpose(1, 2), x[:, here])
    return torch.cat(out, 1)


def test_state_space_duality() -> None:
    groups, states, width = 2, 5, 3
    x, decay = normal(HEADS, TOKENS, width), -normal(HEADS, TOKENS).abs()
    b, c = normal(groups, TOKENS, states), normal(groups, TOKENS, states)
    out, flops = counted(state_space, x, decay, b, c)
    state, expected = x.new_zeros(HEADS, states, width), []
    ins, outs = (each.repeat_interleave(HEADS // groups, 0) for each in (b, c))
    for t in range(TOKENS):
        state = decay[:, t].exp()[:, None, None] * state + ins[:, t, :, None] * x[:, t, None, :]
        expected.append((outs[:, t, :, None] * state).sum(1))
    torch.testing.assert_close(out, torch.stack(expected, 1))
    assert flops == recurrence.ssd_flops(TOKENS, HEADS, width, states, groups, CHUNK)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Decay of each column of the keys, as logarithms."""
    state, out = q.new_zeros(HEADS, k.shape[2], v.shape[2]), []
    for here in chunks():
        total = decay[:, here].cumsum(1)
        seen, given = q[:, here] * total.exp(), k[:, here] * (-total).exp()
        out.append(torch.bmm(torch.bmm(seen, given.transpose(1, 2)).tril(), v[:, here]) + torch.bmm(seen, state))
        left = k[:, here] * (total[:, -1:] - total).exp()
        state = total[:, -1].exp()[..., None] * state + torch.bmm(left.transpose(1, 2), v[:, here])
    return torch.cat(out, 1)


def test_gated_linear_attention() -> None:
    keys, values = 5, 3
    q, k, v = normal(HEADS, TOKENS, keys), normal(HEADS, TOKENS, keys), normal(HEADS, TOKENS, values)
    decay = -0.1 * normal(HEADS, TOKENS, keys).abs()
    out, flops = counted(linear_attention, q, k, v, decay)
    state, expected = q.new_zeros(HEADS, keys, values), []
    for t in range(TOKENS):
        state = decay[:, t].exp()[..., None] * state + k[:, t, :, None] * v[:, t, None, :]
        expected.append((q[:, t, :, None] * state).sum(1))
    torch.testing.assert_close(out, torch.stack(expected, 1))
    assert flops == recurrence.linear_attention_flops(TOKENS, HEADS, keys, values, CHUNK)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """With the inverse of each chunk by forward substitution, whose operations are vector work."""
    state, out = q.new_zeros(HEADS, k.shape[2], v.shape[2]), []
    for here in chunks():
        total, rate = decay[:, here].cumsum(1), beta[:, here, None]
        pairs = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
        system = (torch.bmm(k[:, here] * rate, k[:, here].transpose(1, 2)) * pairs).tril(-1)
        inverse = torch.eye(CHUNK, dtype=q.dtype).repeat(HEADS, 1, 1)
        for row in range(1, CHUNK):
            inverse[:, row] = inverse[:, row] - (system[:, row, :row, None] * inverse[:, :row]).sum(1)
        new = torch.bmm(inverse, v[:, here] * rate)
        keys = torch.bmm(inverse, k[:, here] * rate * total.exp()[..., None])
        new = new - torch.bmm(keys, state)
        scores = torch.bmm(q[:, here], k[:, here].transpose(1, 2)) * pairs
        out.append(torch.bmm(q[:, here] * total.exp()[..., None], state) + torch.bmm(scores, new))
        left = k[:, here] * (total[:, -1:] - total).exp()[..., None]
        state = total[:, -1].exp()[:, None, None] * state + torch.bmm(left.transpose(1, 2), new)
    return torch.cat(out, 1)


def test_gated_delta_rule() -> None:
    keys, values = 5, 3
    q, v = normal(HEADS, TOKENS, keys), normal(HEADS, TOKENS, values)
    k = torch.nn.functional.normalize(normal(HEADS, TOKENS, keys), dim=-1)
    decay, beta = -0.1 * normal(HEADS, TOKENS).abs(), normal(HEADS, TOKENS).sigmoid()
    out, flops = counted(delta_rule, q, k, v, decay, beta)
    state, expected = q.new_zeros(HEADS, keys, values), []
    for t in range(TOKENS):
        state = decay[:, t].exp()[:, None, None] * state
        wrong = v[:, t] - (k[:, t, :, None] * state).sum(1)
        state = state + k[:, t, :, None] * (beta[:, t, None] * wrong)[:, None, :]
        expected.append((q[:, t, :, None] * state).sum(1))
    torch.testing.assert_close(out, torch.stack(expected, 1))
    assert flops == recurrence.delta_rule_flops(TOKENS, HEADS, keys, values, CHUNK)


def test_states_that_ranks_exchange_make_the_sequence_whole() -> None:
    """Ranks run their part from a state of zero; earlier states, decayed, give what is missing (context ranks)."""
    states, width, half = 5, 3, TOKENS // 2
    x, decay = normal(HEADS, TOKENS, width), -normal(HEADS, TOKENS).abs()
    b, c = normal(HEADS, TOKENS, states), normal(HEADS, TOKENS, states)

    def local(part: slice) -> tuple[Tensor, Tensor]:
        state, out = x.new_zeros(HEADS, states, width), []
        for t in range(part.start, part.stop):
            state = decay[:, t].exp()[:, None, None] * state + b[:, t, :, None] * x[:, t, None, :]
            out.append((c[:, t, :, None] * state).sum(1))
        return torch.stack(out, 1), state

    whole, _ = local(slice(0, TOKENS))
    first, handed = local(slice(0, half))
    second, _ = local(slice(half, TOKENS))
    passed = decay[:, half:].cumsum(1).exp()[..., None]
    second = second + torch.bmm(c[:, half:] * passed, handed)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    assert handed.numel() == HEADS * states * width
