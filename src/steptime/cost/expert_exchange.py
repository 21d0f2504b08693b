r"""Time of the exchange of tokens between experts: dispatch to the experts and combination of their results.

A kernel of the library moves each chosen copy of a token once, straight to the rank of its expert; it does not use the
collectives. Symbols: $T$ = `tokens` of one rank, $k$ = `top_k`, $E$ = `experts` in all, $n$ = `ranks`, $t$ = `inside`
ranks of one NVLink domain, $b$ = `row_bytes` of one token on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from steptime.num import Num, ceil_div, maximum, soft_maximum, where

#: Values of a block that share one scale (4 bytes) in 8-bit dispatch, and the bytes of the header of a message.
BLOCK: Final = 128
HEADER_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How such a kernel runs on one machine, one direction (dispatch, or combine)."""

    start_s: float
    """Launch, and one round of flags."""
    expert_s: float
    """One expert more: its counter and flag."""
    Bps: float
    """What a rank sends inside its domain."""
    message_s: float
    """One message of one multiprocessor, whatever its size."""
    message_Bps: float
    """What one multiprocessor moves."""
    blend: float = 2.0
    """How link and multiprocessors overlap: 1 one after the other, infinity the slower one alone."""
    outer_start_s: float = 0.0
    """More of a start where ranks of other domains take part."""
    peer_s: float = 0.0
    """One domain more."""
    outer_Bps: float = 1e9
    """What a rank sends through its NIC."""


def exchange_of(coefficients: Mapping[str, object], way: str) -> Exchange:
    """One direction (``dispatch`` or ``combine``) of a mapping of names `way.field`.

    >>> one = {"start_s": 1e-5, "expert_s": 1e-8, "Bps": 3e11, "message_s": 1e-6, "message_Bps": 4e10}
    >>> exchange_of({f"dispatch_{k}": v for k, v in one.items()}, "dispatch").start_s
    1e-05
    """
    names = [f.name for f in fields(Exchange) if f"{way}_{f.name}" in coefficients]
    return Exchange(**{name: float(coefficients[f"{way}_{name}"]) for name in names})  # type: ignore[arg-type]


def row_bytes(hidden: Num, *, eight_bit: bool) -> Num:
    r"""Bytes of one token on the wire: $2h$ in bf16; in 8 bits $h + 4h/128$ with its scales, and a header.

    where $h$ = `hidden`, and `eight_bit` says which.

    >>> row_bytes(7168, eight_bit=True), row_bytes(7168, eight_bit=False)
    (7408.0, 14336.0)
    """
    return hidden * (1 + 4 / BLOCK) + HEADER_BYTES if eight_bit else 2.0 * hidden


def exchange_s(
    way: str, tokens: Num, top_k: Num, experts: Num, row: Num, ranks: Num, inside: Num, processors: float, one: Exchange
) -> Num:
    r"""Seconds of a low-latency dispatch or combine.

    $$t = \alpha + \alpha_E E + \alpha_1[N > 1] + \alpha_N (N - 1) + \max\Big(\big(W_0^q + M^q\big)^{1/q}, W_1\Big)$$

    $$W_0 = \frac{T k b}{\beta_0},\quad W_1 = \frac{T k b}{\beta_1} \cdot \frac{n - t}{n},\quad
      M = m \Big(\mu + \frac{b}{\beta_m}\Big),\quad
      P = \Big\lceil \frac{E}{\lceil E / P_0 \rceil} \Big\rceil$$

    The kernel gives every expert a group of warps, so with few experts only $P$ of the $P_0$ multiprocessors work:
    in a dispatch each of them takes $m = \lceil T / P \rceil$ tokens, and sends the $k$ copies of one at once; in a
    combine each takes $m = T k / P$ messages.

    Args:
        way: ``dispatch`` or ``combine``.
        tokens, top_k: $T$ and $k$.
        experts: $E$.
        row: $b$, see `row_bytes`.
        ranks, inside: $n$ and $t$; $N = n / t$ domains.
        processors: $P_0$, multiprocessors of the device.
        one: the coefficients $\alpha$ = `start_s`, $\alpha_E$ = `expert_s`, $\alpha_1$ = `outer_start_s`, $\alpha_N$ =
            `peer_s`, $\beta_0$ = `Bps`, $\beta_1$ = `outer_Bps`, $\mu$ = `message_s`, $\beta_m$ = `message_Bps`, $q$
            = `blend`.

    Source: the launch configuration of the low-latency kernels of DeepEP, Zhao et al. 2025; the form is ours.

    >>> plain = Exchange(start_s=1e-5, expert_s=0.0, Bps=1e11, message_s=1e-6, message_Bps=1e12, blend=1.0)
    >>> round(exchange_s("dispatch", 128, 8, 128, 1e4, 8, 8, 132, plain) * 1e6, 2)   # 10 + 102.4 + 1.01
    113.41
    """
    busy = ceil_div(experts, ceil_div(experts, processors))
    messages = ceil_div(tokens, busy) if way == "dispatch" else tokens * top_k / busy
    moved, domains = tokens * top_k * row, ranks / inside
    link_s, work_s = moved / one.Bps, messages * (one.message_s + row / one.message_Bps)
    inner_s = soft_maximum(link_s, work_s, one.blend)
    outer_s = moved * (1 - inside / ranks) / one.outer_Bps
    start_s = one.start_s + one.expert_s * experts + where(domains > 1, one.outer_start_s, 0.0)
    return start_s + one.peer_s * (domains - 1) + maximum(inner_s, outer_s)
