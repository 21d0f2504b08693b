"""Schemas of ATen operators, and the contents of fake tensors that Python may read.

Known contents follow from inputs, constants and shapes; others are assumed.

Contents are kept by storage, so views and in-place operators need no special case: a fake storage has a real one as its
twin, and every operator whose tensors all have contents also runs on these.
"""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steptime.captured import torch_parts as parts
from steptime.captured.graph import Attribute, TensorType
from steptime.captured.record.problems import is_of_user
from steptime.errors import UserError

DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8", torch.float8_e4m3fnuz: "fp8", torch.float8_e5m2: "fp8_e5m2",
    torch.float8_e5m2fnuz: "fp8_e5m2", torch.complex64: "complex64", torch.complex128: "complex128",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
    torch.uint16: "uint16", torch.uint32: "uint32", torch.uint64: "uint64", torch.bool: "bool",
}  # fmt: skip

TORCH_DTYPES = {name: kind for kind, name in reversed(DTYPES.items())}
"""Name of an element type -> PyTorch's type; of two types with one name, the first."""

RANDOM = re.compile(r"dropout|bernoulli|rand|normal|uniform|exponential|multinomial|geometric|cauchy")
"""Pattern of names of operators with random results."""


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """An overload: its plain name, the names of its arguments and of those that it writes, and flags."""

    overload: Any
    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    random: bool
    query: bool
    """It queries a layout or a type, or marks a profile, and is no call of the model."""
    empty: bool
    of_shape: bool
    overwrites: bool
    assumed: bool

    def writes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments that it writes."""
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        return [given[name] for name in self.written if name in given]


_SIGNATURES: dict[int, Signature] = {}
"""Identity of an overload -> its signature, which keeps it alive; hashing an overload is slow Python code."""


def signature(overload: Any) -> Signature:
    """Signature of an overload, read once.

    The name has no namespace ``aten`` and no trailing underscore.
    """
    found = _SIGNATURES.get(id(overload))
    if found is None:
        found = _SIGNATURES[id(overload)] = _read(overload)
    return found


def _read(overload: Any) -> Signature:
    schema = parts.schema_of(overload)
    space, _, name = schema.name.partition("::")
    plain = name.removesuffix("_") if not name.startswith("__") else name
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return Signature(
        overload=overload,
        name=plain if space in ("aten", "steptime_cuda") else f"{space}::{plain}",
        arguments=tuple(a.name for a in schema.arguments),
        written=written,
        random=RANDOM.search(name) is not None and "backward" not in name,
        query=schema.name in ("prim::layout", "prim::dtype") or space == "profiler",
        empty=overload in _EMPTY,
        of_shape=overload in _OF_SHAPE,
        overwrites=overload in _OVERWRITE,
        assumed=overload in _ASSUMED,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Name of an element type.

    Raises:
        UserError: the type has no name (quantised and packed types).
    """
    if dtype not in DTYPES:
        raise UserError(f"tensors of {dtype} cannot be captured", hint="use a plain floating-point or integer type")
    return DTYPES[dtype]


def type_of(tensor: torch.Tensor) -> TensorType:
    """Shape and element type of a tensor, and its strides where it is not contiguous."""
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    return TensorType(tuple(tensor.shape), dtype_name(tensor.dtype), strides)


def attribute(given: Any) -> Attribute:
    """A scalar argument as an attribute; objects without a plain form become text."""
    if given is None or isinstance(given, (bool, int, float, str)):
        return given
    if isinstance(given, torch.dtype):
        return dtype_name(given)
    if isinstance(given, (list, tuple)):
        return tuple(attribute(item) for item in given)
    return str(given)


LARGEST = 2**22
"""Largest number of elements of integer and boolean tensors whose contents are computed."""
LARGEST_FLOAT = 2**20
"""Largest number of elements of floating-point tensors whose contents are computed: masks that are added to scores."""
LARGEST_ZEROS = 2**12
"""Largest number of elements of floating-point fills in the shape of another tensor, of which optimisers make many."""

FINITE = "no number is infinite or undefined"
DRAWN = "a random number is 0.5"
ONES = "integer inputs without values are ones"

DEVICE = torch.ops.prim.device.default
"""Operator that queries the device of a fake tensor, which PyTorch does many times for each operator."""
_OF_SHAPE = frozenset(parts.operators(
    "zeros_like.default", "ones_like.default", "full_like.default", "new_zeros.default", "new_ones.default",
    "new_full.default",
))  # fmt: skip
"""Operators whose result depends only on the shape of their tensor."""
_DRAWN = frozenset(parts.operators("rand.default", "rand_like.default", "uniform.default", "uniform_.default"))
_EMPTY = frozenset(parts.operators("empty.memory_format", "empty_strided.default"))
_OVERWRITE = frozenset(parts.operators("fill_.Scalar", "fill_.Tensor", "zero_.default", "copy_.default"))
_ARE_EQUAL, _DIFFER = parts.operators("eq.Tensor", "eq.Scalar"), parts.operators("ne.Tensor", "ne.Scalar")
_UNDEFINED = parts.operators("isnan.default", "isinf.default")
_ASSUMED = frozenset({*_ARE_EQUAL, *_DIFFER, *_UNDEFINED, *_DRAWN})
"""Operators whose result is assumed if the contents of their tensors are unknown."""


@dataclass(frozen=True, slots=True)
class Content:
    """The numbers of a storage."""

    storage: torch.UntypedStorage
    assumed: frozenset[str] = frozenset()
    """Assumptions on which the numbers rest."""
    uniform: bool = False
    """All elements are one number."""


class Values:
    """Contents of the storages of fake tensors."""

    def __init__(self) -> None:
        self._known: dict[int, Content] = {}
        self.assumed: dict[str, None] = {}
        """Assumptions, each with the line of Python that read the value, in order."""
        self.where = ""
        """The node of a model file that is being read; empty if user code runs."""

    # -- contents -----------------------------------------------------------------------------------------------------

    def put(self, fake: torch.Tensor, real: torch.Tensor, assumed: frozenset[str] = frozenset()) -> None:
        """Set the contents of a new fake tensor; too large ones are not kept."""
        if not _fits(fake) or fake.storage_offset() or real.dtype != fake.dtype or real.shape != fake.shape:
            return
        with parts.without_modes():
            held = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
            self._keep(fake, Content(held.copy_(real.detach()).untyped_storage(), assumed))

    def put_all(self, fake: torch.Tensor, number: float, assumed: frozenset[str]) -> None:
        """Set all elements of a new fake tensor to one number."""
        with parts.without_modes():
            one = torch.tensor([number], dtype=fake.dtype)
        self._keep(fake, Content(one.untyped_storage(), assumed, uniform=True))

    def _keep(self, fake: torch.Tensor, content: Content) -> None:
        storage = fake.untyped_storage()
        if id(storage) not in self._known:
            weakref.finalize(storage, self._known.pop, id(storage), None).atexit = False
        self._known[id(storage)] = content

    def _content(self, tensor: torch.Tensor) -> Content | None:
        return self._known.get(id(tensor.untyped_storage())) if isinstance(tensor, parts.FakeTensor) else None

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A real tensor with the same numbers; None if they are unknown."""
        if not isinstance(tensor, parts.FakeTensor):
            return tensor.detach() if _is_plain(tensor) else None
        content = self._content(tensor)
        if content is None or (content.uniform and content.storage.nbytes() != tensor.element_size()):
            return None
        held = torch.empty(0, dtype=tensor.dtype)
        if content.uniform:
            return held.set_(content.storage, 0, (1,), (1,)).reshape(()).expand(tensor.shape)
        return held.set_(content.storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def read(self, tensors: Any) -> None:
        """Note the assumptions on which the numbers of tensors rest, since Python reads them now."""
        found = {what for tensor in tensors_in(tensors) if (known := self._content(tensor)) for what in known.assumed}
        for what in sorted(found):
            self.take(what)

    def take(self, what: str) -> None:
        """Note an assumption, with the current line of the user's code."""
        self.assumed[f"{what} ({self.where or _reader()})"] = None

    # -- operators ----------------------------------------------------------------------------------------------------

    def are_known(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> bool:
        """True if all numbers on which the result of a call depends are known."""
        known = signature(func)
        if known.empty or known.of_shape:
            return known.of_shape
        unknown = next(filter(self._is_unknown, tensors), None)
        return unknown is None or (known.overwrites and self._is_overwritten(unknown, args))

    def arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments of a call with real tensors; unknown numbers are zeros."""

        def real(tensor: torch.Tensor) -> torch.Tensor:
            found = self.of(tensor)
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) if found is None else found

        with parts.without_modes():
            out: tuple[Any, Any] = parts.pytree.tree_map_only(torch.Tensor, real, (args, kwargs))
        return out

    def _is_overwritten(self, tensor: torch.Tensor, args: Any) -> bool:
        """True if a call overwrites a whole tensor of unknown content with known numbers; it then gets a content."""
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if tensor is not args[0] or not whole or any(map(self._is_unknown, tensors_in(args[1:]))):
            return False
        with parts.without_modes():
            zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        self.put(tensor, zeros)
        return self._content(tensor) is not None

    def _is_unknown(self, tensor: torch.Tensor) -> bool:
        content = self._content(tensor)
        if content is None:
            return not _is_plain(tensor)
        return content.uniform and content.storage.nbytes() != tensor.element_size()

    def follow(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], output: Any, *, known: bool
    ) -> None:
        """Update contents after a call on fake tensors; if they are ``known``, by the call on real tensors."""
        one = signature(func)
        written = tensors_in(one.writes(args, kwargs)) if one.written else []
        if not known and not one.assumed:
            return self._forget(written)
        fresh = _fresh(tensors, output)
        contents = [self._content(tensor) for tensor in written]
        writable = all(content is not None and not content.uniform for content in contents)
        if not known or torch.Tag.nondeterministic_seeded in func.tags or not writable:
            self._forget(written)
            self._assume(func, args, fresh or written)
        elif one.of_shape and fresh[0].is_floating_point() and fresh[0].numel() > LARGEST_ZEROS:
            pass
        elif written or any(_fits(tensor) for tensor in fresh):
            self._compute(func, written, fresh, args, kwargs)
        elif fresh and torch.Tag.pointwise in func.tags:
            self._spread(func, fresh, args, kwargs)
        return None

    def _forget(self, written: list[torch.Tensor]) -> None:
        for tensor in written:
            self._known.pop(id(tensor.untyped_storage()), None)

    def _rests_on(self, args: Any, kwargs: Any) -> frozenset[str]:
        contents = (self._content(tensor) for tensor in tensors_in((args, kwargs)))
        return frozenset(what for content in contents if content is not None for what in content.assumed)

    def _compute(
        self, func: Any, written: list[torch.Tensor], fresh: list[torch.Tensor], args: Any, kwargs: Any
    ) -> None:
        assumed, real = self._rests_on(args, kwargs), self.arguments(args, kwargs)
        with parts.without_modes(), torch.no_grad():
            try:
                results = tensors_in(func(*real[0], **real[1]))
            except Exception:  # It would also fail in a real run; only a read of the result raises here.
                return self._forget(written)
            for tensor in written:
                content = self._content(tensor)
                if content is not None and not assumed <= content.assumed:
                    self._keep(tensor, Content(content.storage, content.assumed | assumed))
            if len(results) == len(fresh):
                for fake, result in zip(fresh, results, strict=True):
                    self.put(fake, result, assumed)
        return None

    def _spread(self, func: Any, fresh: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        """Update contents after a map of tensors that are one number each, too large to be computed."""
        real = self.arguments(args, kwargs)
        tensors = tensors_in(real)
        if not all(tensor.numel() == 1 or not any(tensor.stride()) for tensor in tensors):
            return
        with parts.without_modes(), torch.no_grad():
            ones = parts.pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.as_strided((), ()), real)
            result = func(*ones[0], **ones[1])
            self.put_all(fresh[0], result.item(), self._rests_on(args, kwargs))

    def _assume(self, func: Any, args: Any, results: list[torch.Tensor]) -> None:
        """Questions whether numbers are finite, and single random numbers, which decide a branch if anything."""
        if len(results) != 1:
            return
        same = len(args) > 1 and (args[0] is args[1] or _is_infinite(args[1]))
        with parts.without_modes():
            if func in _UNDEFINED or (func in _ARE_EQUAL and len(args) > 1 and _is_infinite(args[1])):
                self.put_all(results[0], 0, frozenset({FINITE}))
            elif same and func in (*_ARE_EQUAL, *_DIFFER):
                equal = func in _ARE_EQUAL
                self.put_all(results[0], float(equal is (args[0] is args[1])), frozenset({FINITE}))
            elif func in _DRAWN and results[0].numel() == 1:
                self.put_all(results[0], 0.5, frozenset({DRAWN}))


def tensors_in(given: Any) -> list[torch.Tensor]:
    """Tensors in arguments or results, lists and mappings opened."""
    if isinstance(given, torch.Tensor):
        return [given]
    out: list[torch.Tensor] = []
    _collect((given,), out)
    return out


def _collect(given: Iterable[Any], out: list[torch.Tensor]) -> None:
    for one in given:
        if isinstance(one, torch.Tensor):
            out.append(one)
        elif isinstance(one, (list, tuple)):
            _collect(one, out)
        elif isinstance(one, dict):
            _collect(one.values(), out)


def _fresh(tensors: list[torch.Tensor], output: Any) -> list[torch.Tensor]:
    """Results that share no storage with the arguments."""
    given = {id(tensor.untyped_storage()) for tensor in tensors}
    return [tensor for tensor in tensors_in(output) if id(tensor.untyped_storage()) not in given]


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for a real CPU tensor."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


def _fits(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (LARGEST_FLOAT if tensor.is_floating_point() or tensor.is_complex() else LARGEST)


def _is_infinite(given: Any) -> bool:
    return isinstance(given, float) and math.isinf(given)


def _reader() -> str:
    """The current line of the user's code, as ``file:line``."""
    frame = sys._getframe()
    while frame is not None:
        if is_of_user(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a line of PyTorch"
