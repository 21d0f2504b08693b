"""What the generator enumerates: variables of few types, operators with attributes, one row per subject.

Within a universe sizes are equal wherever they may be; a rule is made general afterwards (:mod:`generalise`). ``relu``
stands for any function of one number, because nothing but its being a function is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from steptime.lab.rules.declared import variables_of
from steptime.lab.rules.operators import OPERATORS
from steptime.lab.rules.sizes import Size, size
from steptime.lab.rules.terms import Shape, Variable

_TEMPLATE: Final = re.compile(r"(\w+)(?:\[([^\]]*)\])?(?:@(.+))?")


@dataclass(frozen=True, slots=True)
class Template:
    """An operator with attributes; with ``extent`` it is used only where its axis has that extent."""

    op: str
    attributes: tuple[Size, ...]
    extent: Size | None

    @property
    def arity(self) -> int:
        """Arguments; concatenation takes two."""
        return abs(OPERATORS[self.op].arity) + (self.op == "concat")

    def fits(self, shapes: tuple[Shape, ...]) -> bool:
        """Whether it is used on arguments of these types."""
        return self.extent is None or shapes[0][self.attributes[0].number or 0] == self.extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Universe:
    """Variables, templates and the types that terms may have; sizes at which they are evaluated."""

    name: str
    variables: tuple[Variable, ...]
    templates: tuple[Template, ...]
    types: tuple[Shape, ...]
    assignments: tuple[Mapping[str, int], ...]
    operators: int


def template_of(text: str) -> Template:
    """A template from its text.

    >>> template_of("slice[-1, 0, a]@n").attributes[2] == size("a")
    True
    """
    found = _TEMPLATE.fullmatch(text)
    assert found is not None
    attributes = tuple(size(each) for each in (found[2] or "").split(",") if each.strip())
    return Template(found[1], attributes, size(found[3]) if found[3] else None)


def universe(
    name: str, variables: str, templates: str, types: str, operators: int, sizes: tuple[Mapping[str, int], ...]
) -> Universe:
    """A universe from its texts."""
    shapes = tuple(tuple(size(dim) for dim in each.split(",")) for each in types.split())
    return Universe(
        name=name,
        variables=variables_of(variables),
        templates=tuple(map(template_of, templates.split())),
        types=shapes,
        assignments=sizes,
        operators=operators,
    )


PLANE: Final = ({"n": 3, "m": 2, "a": 1}, {"n": 4, "m": 3, "a": 2})
SPACE: Final = ({"n": 3, "m": 2, "k": 4, "a": 1}, {"n": 4, "m": 3, "k": 2, "a": 2})
IMAGE: Final = ({"n": 2, "c": 2, "h": 3, "a": 1}, {"n": 1, "c": 3, "h": 4, "a": 1})
ORDERED: Final = ({"n": 9, "m": 8, "a": 3}, {"n": 10, "m": 7, "a": 4})
"""Larger sizes where maxima are taken, which are equal by chance in small tensors."""
SQUARES: Final = "n,n 2*n,n n,2*n 2*n,2*n 3*n,n n,3*n"
UNIVERSES: Final = (
    universe("matrix", "x[n,n] y[n,n] z[n,n]", "matmul add mul transpose[-1,-2] relu", "n,n", 4, PLANE),
    universe("joined", "x[n,n] y[n,n] z[n,n]", "matmul add concat[-1] concat[-2] relu", SQUARES, 3, PLANE),
    universe("merged", "x[n,n] y[n,n]", "matmul add concat[-1] concat[-2] transpose[-1,-2]", SQUARES, 4, PLANE),
    universe(
        "sliced",
        "x[n,n] y[n,n]",
        "matmul add relu slice[-1,0,a]@n slice[-1,a,n]@n slice[-2,0,a]@n slice[-2,a,n]@n "
        "transpose[-1,-2] concat[-1] concat[-2]",
        "n,n a,n n,a a,a n-a,n n,n-a n-a,n-a a,n-a n-a,a",
        4,
        PLANE,
    ),
    universe(
        "cut",
        "x[n,n] y[n,n] z[n,n]",
        "add relu matmul concat[-1] concat[-2] slice[-1,0,n]@2*n slice[-1,n,2*n]@2*n slice[-2,0,n]@2*n "
        "slice[-2,n,2*n]@2*n",
        "n,n 2*n,n n,2*n 2*n,2*n",
        3,
        PLANE,
    ),
    universe(
        "lattice", "x[m,n] y[m,n] b[1,n] c[m,1]", "maximum add max[-1] max[-2] relu", "m,n 1,n m,1 1,1", 3, ORDERED
    ),
    universe("reduced", "x[m,n] y[m,n] b[1,n] c[m,1]", "add mul sum[-1] sum[-2]", "m,n 1,n m,1 1,1", 4, PLANE),
    universe("averaged", "x[m,n] y[m,n] c[m,1]", "add mul mean[-1] mean[-2] sum[-1]", "m,n 1,n m,1 1,1", 4, PLANE),
    universe("normed", "x[m,n] c[m,1] b[1,n]", "add sub mul mean[-1] recip sqrt", "m,n 1,n m,1 1,1", 3, PLANE),
    universe("products", "x[n,n] y[n,n] b[1,n] c[n,1]", "matmul add mul sum[-1] sum[-2]", "n,n 1,n n,1 1,1", 3, PLANE),
    universe("softmax", "x[m,n] y[m,n] c[m,1] b[1,n]", "softmax[-1] softmax[-2] exp add mul", "m,n 1,n m,1", 3, PLANE),
    universe(
        "attention",
        "x[n,n] y[n,n] z[n,n]",
        "softmax[-1] softmax[-2] matmul transpose[-1,-2] concat[-1] concat[-2]",
        SQUARES,
        3,
        PLANE,
    ),
    universe(
        "signs",
        "x[m,n] y[m,n]",
        "add sub mul neg scale[s] scale[t]",
        "m,n",
        4,
        ({"n": 3, "m": 2, "s": 2, "t": 3}, {"n": 4, "m": 3, "s": 5, "t": 7}),
    ),
    universe(
        "batched",
        "x[b,n,n] y[b,n,n] w[n,n]",
        "matmul add transpose[-1,-2] concat[-1] relu",
        "b,n,n n,n b,n,2*n n,2*n",
        3,
        ({"n": 3, "b": 2}, {"n": 2, "b": 3}),
    ),
    universe(
        "conv",
        "x[n,c,h,h] y[n,c,h,h] u[c,c,3,3] v[c,c,3,3]",
        "conv[1,1,1,1] add relu concat[-3] concat[-4]",
        "n,c,h,h c,c,3,3 n,2*c,h,h 2*n,c,h,h 2*c,c,3,3 c,2*c,3,3 2*c,2*c,3,3",
        3,
        IMAGE,
    ),
    universe(
        "kernels",
        "x[n,c,h,h] u[c,c,1,1] v[c,c,1,1] w[c,c,3,3]",
        "conv[1,0,1,1] conv[1,1,1,1] enlarge[1] add concat[-4] relu",
        "n,c,h,h c,c,3,3 c,c,1,1 n,2*c,h,h 2*c,c,3,3 2*c,c,1,1",
        3,
        IMAGE,
    ),
    universe(
        "pools",
        "x[n,c,h,h] y[n,c,h,h] u[c,c,1,1]",
        "conv[1,0,1,1] avgpool[3,1,1] maxpool[3,1,1] add maximum concat[-3] concat[-4] relu neg",
        "n,c,h,h n,2*c,h,h 2*n,c,h,h c,c,1,1 2*c,c,1,1",
        3,
        IMAGE,
    ),
    universe(
        "channels",
        "x[n,c,h,h] y[n,c,h,h] u[c,c,3,3] v[c,c,3,3]",
        "conv[1,1,1,1] add slice[-3,0,a]@c slice[-3,a,c]@c slice[-4,0,a]@c slice[-4,a,c]@c concat[-3] concat[-4] relu",
        "n,c,h,h c,c,3,3 a,c,3,3 c,a,3,3 c-a,c,3,3 c,c-a,3,3 n,a,h,h n,c-a,h,h",
        3,
        ({"n": 2, "c": 3, "h": 3, "a": 1}, {"n": 1, "c": 5, "h": 4, "a": 2}),
    ),
    universe(
        "groups",
        "x[n,c,h,h] y[n,c,h,h] u[c,c,3,3] v[c,c,3,3]",
        "conv[1,1,1,1] conv[1,1,1,2] add concat[-3] concat[-4]",
        "n,c,h,h c,c,3,3 n,2*c,h,h 2*c,c,3,3",
        3,
        ({"n": 2, "c": 2, "h": 3}, {"n": 1, "c": 4, "h": 4}),
    ),
    universe(
        "summed-parts",
        "x[m,n] y[m,n]",
        "add relu sum[-1] sum[-2] max[-1] max[-2] mean[-1] mean[-2] concat[-1] concat[-2] transpose[-1,-2]",
        "m,n n,m m,2*n 2*m,n 2*n,m n,2*m m,1 1,n n,1 1,m 1,1 2*m,1 1,2*n m,2 2,n 2*n,1 1,2*m",
        3,
        ORDERED,
    ),
    universe(
        "cut-sums",
        "x[n,n] y[n,n]",
        "add mul sum[-1] sum[-2] max[-1] max[-2] softmax[-1] slice[-1,0,a]@n slice[-1,a,n]@n slice[-2,0,a]@n "
        "transpose[-1,-2]",
        "n,n a,n n,a n,n-a a,a n,1 1,n a,1 1,a 1,n-a",
        3,
        ORDERED,
    ),
    universe(
        "three-axes",
        "x[k,m,n] y[k,m,n]",
        "add relu sum[-1] sum[-2] sum[-3] transpose[-1,-2] transpose[-2,-3] concat[-3]",
        "k,m,n k,n,m m,k,n k,m,1 k,1,n 1,m,n 1,1,n k,1,1 1,m,1 2*k,m,n m,n,k n,k,m n,m,k",
        3,
        SPACE,
    ),
    universe(
        "three-parts",
        "x[n,n,n] y[n,n,n]",
        "mul concat[-1] concat[-2] concat[-3] transpose[-1,-2] transpose[-2,-3] softmax[-1] max[-3]",
        "n,n,n n,n,2*n n,2*n,n 2*n,n,n 1,n,n",
        3,
        SPACE,
    ),
    universe(
        "slabs",
        "x[n,n,n] y[n,n,n]",
        "add relu matmul slice[-1,0,a]@n slice[-2,0,a]@n slice[-3,0,a]@n transpose[-1,-2] softmax[-1] softmax[-2]",
        "n,n,n a,n,n n,a,n n,n,a a,a,n a,n,a n,a,a",
        3,
        SPACE,
    ),
    universe(
        "broadcast",
        "x[m,n] b[1,n] c[m,1] s[1,1]",
        "expand[-1,n] expand[-2,m] add mul relu sum[-1] mean[-2]",
        "m,n 1,n m,1 1,1",
        3,
        PLANE,
    ),
    universe(
        "scaled-products",
        "x[n,n] y[n,n] b[1,n] c[n,1]",
        "matmul scale[s] sub neg mul transpose[-1,-2]",
        "n,n 1,n n,1 1,1",
        3,
        ({"n": 3, "s": 2}, {"n": 4, "s": 5}),
    ),
    universe(
        "scaled-parts",
        "x[n,n] y[n,n]",
        "scale[s] sub neg maximum concat[-1] concat[-2] slice[-1,0,n]@2*n slice[-1,n,2*n]@2*n transpose[-1,-2]",
        "n,n 2*n,n n,2*n",
        3,
        ({"n": 3, "s": 2}, {"n": 4, "s": 5}),
    ),
    universe(
        "framed",
        "x[n,n] y[n,n]",
        "add matmul relu pad[-1,0,n] pad[-1,n,0] pad[-2,0,n] pad[-2,n,0] concat[-1] concat[-2] "
        "slice[-1,0,n]@2*n slice[-1,n,2*n]@2*n transpose[-1,-2]",
        "n,n n,2*n 2*n,n 2*n,2*n",
        3,
        PLANE,
    ),
    universe(
        "strided",
        "x[n,c,h,h] y[n,c,h,h] u[c,c,3,3] v[c,c,3,3]",
        "conv[2,1,1,1] conv[1,2,2,1] sub neg scale[s] concat[-3] concat[-4]",
        "n,c,h,h c,c,3,3 n,c,(h-1)//2+1,(h-1)//2+1 n,2*c,h,h 2*n,c,h,h 2*c,c,3,3 c,2*c,3,3",
        3,
        ({"n": 2, "c": 2, "h": 3, "s": 2}, {"n": 1, "c": 3, "h": 5, "s": 3}),
    ),
    universe(
        "margins",
        "x[n,c,h,h] u[c,c,3,3] v[c,c,3,3] w[c,c,1,1]",
        "conv[1,0,1,1] conv[1,1,1,1] pad[-1,1,1] pad[-2,1,1] enlarge[1] add relu",
        "n,c,h,h n,c,h,h+2 n,c,h+2,h n,c,h+2,h+2 c,c,3,3 c,c,1,1 c,c,1,3 c,c,3,1",
        3,
        IMAGE,
    ),
    universe(
        "channel-factors",
        "x[n,c,h,h] y[n,c,h,h] b[1,c,1,1] u[c,c,3,3] f[c,1,1,1]",
        "conv[1,1,1,1] mul add sum[-1] sum[-2] mean[-1]",
        "n,c,h,h c,c,3,3 1,c,1,1 c,1,1,1 n,c,h,1 n,c,1,h n,c,1,1",
        3,
        IMAGE,
    ),
    universe(
        "pool-parts",
        "x[n,c,h,h] y[n,c,h,h]",
        "avgpool[3,1,1] maxpool[3,1,1] avgpool[2,2,0] maxpool[2,2,0] scale[s] sub concat[-3] slice[-3,0,a]@c "
        "slice[-4,0,a]@n transpose[-1,-2] max[-3] sum[-3]",
        "n,c,h,h n,2*c,h,h n,a,h,h a,c,h,h a,a,h,h n,1,h,h n,c,h//2,h//2 n,a,h//2,h//2 n,1,h//2,h//2 n,2*c,h//2,h//2",
        3,
        ({"n": 2, "c": 3, "h": 4, "a": 1, "s": 2}, {"n": 3, "c": 4, "h": 6, "a": 2, "s": 3}),
    ),
    universe(
        "attention-parts",
        "x[n,n] y[n,n] z[n,n] c[n,1]",
        "softmax[-1] matmul add mul slice[-2,0,a]@n slice[-1,0,a]@n concat[-2]",
        "n,n 2*n,n a,n n,a a,a n,1 a,1",
        3,
        PLANE,
    ),
    universe(
        "extremes",
        "x[m,n] y[m,n]",
        "maximum max[-1] max[-2] concat[-1] concat[-2] transpose[-1,-2] relu",
        "m,n n,m m,2*n 2*m,n m,1 1,n n,1 1,m 1,1 2*n,m n,2*m",
        4,
        ORDERED,
    ),
    universe(
        "padded",
        "x[m,n] y[m,n]",
        "add mul relu neg pad[-1,1,1] pad[-2,1,1] transpose[-1,-2] sum[-1]",
        "m,n n,m m,n+2 n+2,m m+2,n n,m+2 m+2,n+2 n+2,m+2 m,1 n,1 m+2,1 n+2,1",
        4,
        PLANE,
    ),
)
