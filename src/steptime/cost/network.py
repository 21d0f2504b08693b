r"""Slowdown of a group of ranks in a network with unequal links: tiers, shared uplinks, tori, clouds.

A network is tiers of blocks: nodes under a leaf switch, leaf switches under a spine. A group has $o$ members in
different nodes, of which $m$ lie together in one block; so it has $o / m$ blocks. $\sigma$ is the oversubscription of
the tier above the block: bandwidth into it over bandwidth across it. All groups of an axis communicate at once, as the
ranks of a job do, so that a block sends what each of its groups sends out of it. Slowdowns are of the bytes between
nodes, against a network on which each rank has its own links everywhere: 1 is none.
"""

from __future__ import annotations

from steptime.num import Num, maximum, minimum, where


def ring_uplink_slowdown(members: Num, oversubscription: Num, rate: Num = 1.0, most: Num = 1.0) -> Num:
    r"""Slowdown of rings by the uplinks of a block in which $m$ = `members` of each ring lie.

    $$s = \frac{1}{\min\left(\rho_1,\ \rho\, m / \sigma\right)}$$

    where a block of $n$ ranks has $n / m$ rings, each of which leaves it once, over links that carry
    $\rho\, n / \sigma$ rings: $\rho$ = `rate` is what a rank has of the tier over what it has of the first one,
    $\sigma$ = `oversubscription`; one ring gets $\rho_1$ = `most` at the best.

    Source: own, by counting flows; that a ring which is numbered along the blocks crosses each border once: Thakur et
    al. 2005, section 3; oversubscribed spines of 1:7: arXiv 2407.21783 (Llama 3), section 3.3.1.

    >>> ring_uplink_slowdown(2, 4.0), ring_uplink_slowdown(8, 4.0)   # two of its nodes under each leaf; eight
    (2.0, 1.0)
    """
    return 1 / minimum(most, rate * members / oversubscription)


def exchange_uplink_slowdown(
    nodes: Num, members: Num, oversubscription: Num, rate: Num = 1.0, most: Num = 1.0, kept: Num = 1.0
) -> Num:
    r"""Slowdown of an exchange between all pairs of a group over $o$ = `nodes`, $m$ = `members` of them in a block.

    $$s = \max\left(\frac{1}{\rho_1},\ \left(1 - \kappa\, \frac{m - 1}{o - 1}\right) \frac{\sigma}{\rho}\right)$$

    where $\frac{m-1}{o-1}$ is the part of the bytes between nodes whose target lies in the same block, $\kappa$ =
    `kept` the part of these that stay below the tier (on rails without forwarding: one of the number of rails). The
    other symbols are those of :func:`ring_uplink_slowdown`.

    Source: own, by counting bytes; forwarding inside a node so that messages stay on their rail: NCCL 2.12, PXN.

    >>> exchange_uplink_slowdown(8, 4, 7.0), exchange_uplink_slowdown(5, 5, 2.0)
    (4.0, 1.0)
    """
    stays = kept * (members - 1) / maximum(nodes - 1, 1)
    return maximum(1 / most, (1 - stays) * oversubscription / rate)


def mean_hop_ratio(nodes: Num, members: Num) -> Num:
    r"""Part of the hops of a ring over $o$ = `nodes` that leave their blocks of $m$ = `members`: $(o/m - 1)/(o - 1)$.

    Source: definition; a ring of $o / m$ blocks in their order has $o/m - 1$ borders, as
    :func:`steptime.cost.collective.ring_transfer_s` counts them.

    >>> mean_hop_ratio(8, 4), mean_hop_ratio(8, 8)
    (0.14285714285714285, 0.0)
    """
    return (nodes / members - 1) / maximum(nodes - 1, 1)


def scattered_members(block: Num, pool: Num) -> Num:
    r"""Members of a ring that lie together in blocks of $B$ = `block` nodes, drawn at random from $P$ = `pool`.

    $$m = \frac{1}{1 - \frac{B - 1}{P - 1}}$$

    A neighbour in the ring is one of the $P - 1$ other nodes, $B - 1$ of which share the block; $1/m$ is the mean part
    of the hops that leave it. In the worst case all do: $m = 1$.

    Source: own; drawing without replacement.

    >>> scattered_members(5, 17), scattered_members(1, 17)
    (1.3333333333333333, 1.0)
    """
    return 1 / (1 - (block - 1) / maximum(pool - 1, block))


def dragonfly_ring_factor(groups: Num) -> Num:
    r"""Global bandwidth that a ring takes on a dragonfly of $g$ = `groups` over that of traffic to all groups.

    $$f = \min(g - 1,\ 2)$$

    All that leaves a group goes to one other: on the shortest path it has one of the $g - 1$ bundles of links, with
    detours through other groups (Valiant routing) all of them at two links a byte. Adaptive routing takes the better.

    Source: Kim et al., Technology-driven, highly-scalable dragonfly topology, ISCA 2008, section 4 (worst-case
    traffic: minimal routing 1/(ah), Valiant half the capacity).

    >>> dragonfly_ring_factor(2), dragonfly_ring_factor(64)
    (1, 2)
    """
    return minimum(groups - 1, 2)


def dragonfly_exchange_factor(spanned: Num, groups: Num) -> Num:
    r"""The same of an exchange over $h$ = `spanned` of the $g$ groups: $\min\left(\frac{g-1}{h-1},\ 2\right)$.

    Minimal paths use the bundles to the other $h - 1$ groups only.

    Source: as :func:`dragonfly_ring_factor`.

    >>> dragonfly_exchange_factor(8, 8), dragonfly_exchange_factor(2, 8), dragonfly_exchange_factor(6, 8)
    (1.0, 2.0, 1.4)
    """
    return minimum(maximum(groups - 1, 1) / maximum(spanned - 1, 1), 2.0)


def torus_ring_links(members: Num, stride: Num, wraps: Num) -> Num:
    r"""Links of one dim of a torus that a ring over $n$ = `members`, `stride` apart, has to itself.

    $$\lambda = \frac{1 + w}{k}\Big|_{n > 1}$$

    where $w$ = `wraps` is 1 where the dim closes (both directions carry half of a ring each) and $k$ = `stride` rings
    lie between neighbours and share the links. A ring over several dims has the sum of theirs.

    Source: Austin et al., How to scale your model (2025), chapter 3: an all-gather over an axis of a torus moves
    $2 \beta$, over several axes the multiple.

    >>> torus_ring_links(4, 1, 1.0), torus_ring_links(4, 4, 1.0), torus_ring_links(2, 1, 0.0)
    (2.0, 0.5, 1.0)
    """
    return where(members > 1, (1.0 + wraps) / stride, 0.0 * stride)


def torus_exchange_s_per_byte(members: Num, stride: Num, wraps: Num) -> Num:
    r"""Time of an exchange between all pairs per byte of a rank and link rate, in one dim of a torus.

    $$x = \frac{n k}{8}\Big|_{w=1}, \qquad x = \frac{n k}{4}\Big|_{w=0}$$

    where a message travels $n k / 4$ links on the mean in a ring of $n$ = `members`, $k$ = `stride` apart, which has
    two links a rank ($w$ = `wraps`); the middle link of an open line carries $n k / 4$ ranks' bytes. The slowest
    dim sets the pace.

    Source: bisection of a torus, Dally and Towles 2004, section 5.2; the same in Austin et al. (2025), chapter 3: an
    all-to-all costs a quarter of an all-gather on a ring of both directions.

    >>> torus_exchange_s_per_byte(8, 1, 1.0), torus_exchange_s_per_byte(8, 1, 0.0)
    (1.0, 2.0)
    """
    return where(members > 1, members * stride / where(wraps > 0, 8.0, 4.0), 0.0 * stride)


def fair_share_wait_s(background_s: Num, exposed_s: Num) -> Num:
    r"""Delay of transfers that share a link with traffic in the background.

    $$t = \min(T_b,\ T_e)$$

    where $T_e$ = `exposed_s` and $T_b$ = `background_s` are what either takes alone: with half of the link each, the
    shorter is done after twice its time, and the step waits for the exposed transfers.

    Source: max-min fairness of two flows on one link, Bertsekas and Gallager, Data Networks, section 6.5.2.

    >>> fair_share_wait_s(0.5, 0.2), fair_share_wait_s(0.1, 0.2), fair_share_wait_s(0.0, 0.2)
    (0.2, 0.1, 0.0)
    """
    return minimum(background_s, exposed_s)
