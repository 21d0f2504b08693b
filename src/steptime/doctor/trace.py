"""Reader of Kineto traces into arrays: kernels, launches, steps, collectives, blocking calls.

Events are streamed in bounded memory, also from gzip and from files that were cut off.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steptime.doctor.source import CHUNK, HINT, Text, open_bytes
from steptime.errors import InputFileError, first_few, shorten

#: Largest single value of a trace (one event, or one entry of the file other than events).
MAX_VALUE: Final = 64 * 2**20
_SPACE: Final = " \t\r\n,"


class BrokenJson(Exception):
    """Error: the text is not JSON from this point on, or ends inside a value."""


class _Cursor:
    """Position in a text that is read piece by piece."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._decode = json.JSONDecoder().raw_decode
        self._buffer = ""
        self._at = 0

    def _fill(self) -> bool:
        """Read more text; False at the end."""
        rest = self._buffer[self._at :]
        more = self._text.read(max(CHUNK, len(rest)))
        self._buffer, self._at = rest + more, 0
        return bool(more)

    def _early(self) -> BrokenJson:
        cut = self._text.cut
        return BrokenJson("the file ends early" + (f" ({cut})" if cut else ", or is no JSON from there on"))

    def peek(self) -> str:
        """The next character that is neither white space nor a comma; empty at the end."""
        while True:
            while self._at < len(self._buffer):
                if self._buffer[self._at] not in _SPACE:
                    return self._buffer[self._at]
                self._at += 1
            if not self._fill():
                return ""

    def skip(self, character: str) -> None:
        """Skip one expected character."""
        found = self.peek()
        if not found:
            raise self._early()
        if found != character:
            raise BrokenJson(f"{character!r} expected, not {found!r}")
        self._at += 1

    def value(self) -> Any:
        """The next value."""
        if not self.peek():
            raise self._early()
        while True:
            try:
                value, end = self._decode(self._buffer, self._at)
            except RecursionError:
                raise BrokenJson("a value is too deep") from None
            except ValueError:
                if len(self._buffer) - self._at > MAX_VALUE or not self._fill():
                    raise self._early() from None
                continue
            if end < len(self._buffer) or not isinstance(value, (int, float)):
                self._at = end
                return value
            if not self._fill():
                self._at = len(self._buffer)
                return value


def events_of(path: str) -> Iterator[tuple[str, Any]]:
    """Pairs of key and value of a trace; each event is ``("event", {...})``.

    Entries of the file other than ``traceEvents`` have their own keys, in the order of the file. A bare list of
    events is a trace too.

    Raises:
        InputFileError: the file cannot be opened.
        BrokenJson: the text stops being JSON; earlier pairs are valid.
    """
    with open_bytes(path) as file:
        cursor = _Cursor(Text(file))
        if cursor.peek() == "[":
            yield from _list(cursor)
            return
        cursor.skip("{")
        while cursor.peek() != "}":
            key = cursor.value()
            cursor.skip(":")
            if key == "traceEvents" and cursor.peek() == "[":
                yield from _list(cursor)
            else:
                yield str(key), cursor.value()


def _list(cursor: _Cursor) -> Iterator[tuple[str, Any]]:
    cursor.skip("[")
    while cursor.peek() != "]":
        yield "event", cursor.value()
    cursor.skip("]")


#: Groups of kernels in the order in which shared time is assigned.
GROUPS: Final = ("attention", "matmul", "optimizer", "memory_bound", "copies")
COMM: Final = "comm"

#: Rules by kernel name; first match wins. Names from CUTLASS, cuBLAS, cuDNN, Triton, Transformer Engine, NCCL/RCCL,
#: hipBLASLt.
_RULES: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    (COMM, re.compile(r"nccl|rccl|deep_ep|userbuffers|all_?reduce_(one|two)_?shot|multimem", re.I)),
    ("copies", re.compile(r"^mem(cpy|set)\b", re.I)),
    (
        "attention",
        re.compile(
            r"flash|fmha|sdpa|attention|attn(?!.*norm)|_bwd_kernel_dk|_bwd_kernel_dq|efficient_attention|paged_kv", re.I
        ),
    ),
    (
        "optimizer",
        re.compile(r"adam|lamb(?!da)|sgd|multi_tensor_apply|multi_tensor_l2norm|foreach|distributed_optim|muon", re.I),
    ),
    (
        "matmul",
        re.compile(
            r"gemm|xmma|nvjet|cutlass.*(tensorop|wgmma|sm\d+)|cublas|matmul|_mm_|triton_(tem|mm)|splitKreduce|gemv|conv|"
            r"wgrad|dgrad|implicit_|Cijk_|s\d{4,5}(gemm|cudnn)|bmm",
            re.I,
        ),
    ),
)
_COLLECTIVES: Final = (
    ("all_reduce", re.compile(r"all_?reduce", re.I)),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.I)),
    ("all_gather", re.compile(r"all_?gather", re.I)),
    ("all_to_all", re.compile(r"all_?to_?all", re.I)),
    ("send_recv", re.compile(r"send|recv|p2p", re.I)),
    ("broadcast", re.compile(r"broadcast", re.I)),
)

#: Kinds whose kernels serve other collectives too: NCCL sends all-to-all traffic as messages.
_SHARED: Final = ("send_recv", "other")
#: Words of a process group's description by axis; the first match decides.
_AXIS_WORDS: Final = (
    ("pp", {"pp", "pipeline"}),
    ("ep", {"ep", "expert", "experts"}),
    ("dp", {"dp", "fsdp", "hsdp", "ddp", "data", "optimizer", "shard", "replicate", "zero"}),
    ("tp", {"tp", "tensor"}),
    ("cp", {"cp", "context", "sequence"}),
)
AXES: Final = ("tp", "cp", "ep", "dp", "pp")
UNASSIGNED: Final = "unassigned"


def group_of(name: str) -> str:
    """The group of a kernel; unknown kernels count as memory-bound.

    >>> group_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'comm'
    >>> group_of("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"), group_of("triton_red_fused_add_mul_3")
    ('matmul', 'memory_bound')
    """
    return next((group for group, pattern in _RULES if pattern.search(name)), "memory_bound")


def collective_of(name: str) -> str:
    """The collective named by a kernel or a record.

    >>> collective_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"), collective_of("_allgather_base")
    ('reduce_scatter', 'all_gather')
    """
    return next((kind for kind, pattern in _COLLECTIVES if pattern.search(name)), "other")


def axis_of(description: str, group_size: int | None, collective: str, degrees: Mapping[str, int]) -> str:
    """The mesh axis of a process group.

    Its description decides; then the only axis with more than one rank or with the group's size; then the collective.

    Args:
        description: ``Process Group Description`` of the trace, may be empty.
        group_size: ranks of the group, where known.
        collective: kind of collective.
        degrees: ranks of each axis, where known.

    >>> axis_of("TENSOR_MODEL_PARALLEL_GROUP", 8, "all_gather", {}), axis_of("mesh_dp_shard", None, "all_gather", {})
    ('tp', 'dp')
    """
    words = set(re.split(r"[^a-z]+", description.lower()))
    for axis, known in _AXIS_WORDS:
        if words & known:
            return axis
    wide = [axis for axis in AXES if degrees.get(axis, 1) > 1]
    same = [axis for axis in wide if degrees[axis] == group_size]
    for candidates in (wide, same):
        if len(candidates) == 1:
            return candidates[0]
    if collective == "send_recv" and (not degrees or degrees.get("pp", 1) > 1):
        return "pp"
    if "ep" in wide and (collective == "all_to_all" or (collective == "send_recv" and "cp" not in wide)):
        return "ep"
    return UNASSIGNED


_KERNELS: Final = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
_RUNTIME: Final = {"cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "privateuse1_runtime"}
_BLOCKING: Final = ("Synchronize", "cudaMalloc", "cudaFree", "hipMalloc", "hipFree")
_STEP: Final = "ProfilerStep"
#: Categories of host events that make up most of a trace.
_MANY: Final = frozenset({"cpu_op", "python_function"})
_OF_HOST: Final = frozenset({"cpu_op", "user_annotation"})
#: Most calls that may be nested: an annotation, a record, and the calls of a group.
_NESTED: Final = 8
_ON_HOST: Final = _RUNTIME | _MANY | {"user_annotation"}
#: Shorter host events (us) are not kept: they cause no long pause.
_LONG_HOST_US: Final = 100.0
#: Start and duration (us) beyond which an event is damaged.
_LATEST_US: Final = 1e17
_LONGEST_US: Final = 1e12


@dataclass(frozen=True, slots=True)
class Collective:
    """Description of one kind of communication kernel in a trace."""

    kind: str
    group: str
    """Description of the process group; may be empty."""
    group_size: int | None
    elements: float
    """The larger of input and output elements; 0: unknown."""
    said: bool = False
    """True if the profiler's record of the call names the collective; otherwise its kernel's name does."""


@dataclass(slots=True)
class Recording:
    """Columns of the kernels of a trace (microseconds), with launches, calls, steps and host events."""

    start_us: array[float] = field(default_factory=lambda: array("d"))
    length_us: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("q"))
    stream: array[int] = field(default_factory=lambda: array("q"))
    device: array[int] = field(default_factory=lambda: array("q"))
    correlation: array[int] = field(default_factory=lambda: array("q"))
    collective: array[int] = field(default_factory=lambda: array("q"))
    launch_id: array[int] = field(default_factory=lambda: array("q"))
    launch_us: array[float] = field(default_factory=lambda: array("d"))
    launch_thread: array[int] = field(default_factory=lambda: array("q"))
    names: dict[str, int] = field(default_factory=dict)
    collectives: dict[Collective, int] = field(default_factory=dict)
    blocking: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Blocking runtime call -> start and length (us) of each."""
    host_steps: dict[str, tuple[float, float]] = field(default_factory=dict)
    device_steps: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Step -> start and end (us), for steps annotated on the host and on the device."""
    host_us: array[float] = field(default_factory=lambda: array("d"))
    host_length_us: array[float] = field(default_factory=lambda: array("d"))
    host_name: array[int] = field(default_factory=lambda: array("q"))
    host_thread: array[int] = field(default_factory=lambda: array("q"))
    """Thread of each long host event: operators, functions, annotations and runtime calls."""
    host_names: dict[str, int] = field(default_factory=dict)
    calls: dict[int, list[tuple[float, float, Collective]]] = field(default_factory=dict)
    """Thread -> start and end (us) of each call of a collective, and its description."""
    optimizer_us: list[tuple[float, float]] = field(default_factory=list)
    """Start and end on the device of the optimiser's annotation."""
    header: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    damaged: int = 0
    with_stack: bool = False
    cut: str | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event of the trace."""
        self.events += 1
        category = event.get("cat")
        if not isinstance(category, str):
            return
        category = category.lower()
        self.with_stack |= category == "python_function"
        if category in _OF_HOST and _is_call(event.get("name")):
            self._call(event)
        if category in ("ac2g", "fwdbwd", "trace", "overhead") or (category in _MANY and _is_short(event.get("dur"))):
            return
        if event.get("ph", "X") != "X":
            return
        start, length, name = _time(event.get("ts")), _time(event.get("dur", 0.0)), event.get("name")
        if start is None or length is None or not 0 <= length <= _LONGEST_US or not isinstance(name, str):
            self.damaged += category in _KERNELS
            return
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if category in _KERNELS:
            self._kernel(name, start, length, args, event)
        elif category in _RUNTIME:
            self._runtime(name, start, length, args, _int(event.get("tid")))
        elif category in ("user_annotation", "gpu_user_annotation"):
            self._annotation(category == "gpu_user_annotation", name, start, length)
        if length >= _LONG_HOST_US and category in _ON_HOST and not name.startswith(_STEP):
            self._host(name, start, length, _int(event.get("tid")))

    def _host(self, name: str, start: float, length: float, thread: int) -> None:
        self.host_us.append(start)
        self.host_length_us.append(length)
        self.host_thread.append(thread)
        self.host_name.append(self.host_names.setdefault(name[:200], len(self.host_names)))

    def _kernel(self, name: str, start: float, length: float, args: Mapping[str, Any], event: Any) -> None:
        self.start_us.append(start)
        self.length_us.append(length)
        self.name.append(self.names.setdefault(name[:400], len(self.names)))
        self.stream.append(_int(args.get("stream", event.get("tid"))))
        self.device.append(_int(args.get("device", event.get("pid"))))
        self.correlation.append(_int(args.get("correlation")))
        meta = _collective(name, args) if "Collective name" in args or group_of(name) == COMM else None
        self.collective.append(-1 if meta is None else self.collectives.setdefault(meta, len(self.collectives)))

    def _runtime(self, name: str, start: float, length: float, args: Mapping[str, Any], thread: int) -> None:
        if "correlation" in args:
            self.launch_id.append(_int(args["correlation"]))
            self.launch_us.append(start)
            self.launch_thread.append(thread)
        if any(word in name for word in _BLOCKING):
            self.blocking.setdefault(name[:80], []).append((start, length))

    def _call(self, event: Mapping[str, Any]) -> None:
        """Keep a call of a collective: older profilers describe it on the host only."""
        start, length, args = _time(event.get("ts")), _time(event.get("dur", 0.0)), event.get("args")
        if start is not None and length is not None and 0 <= length <= _LONGEST_US:
            said = _collective(event["name"], args if isinstance(args, dict) else {})
            self.calls.setdefault(_int(event.get("tid")), []).append((start, start + length, said))

    def name_kernels_by_calls(self) -> None:
        """Describe each communication kernel without a description by the call around its launch."""
        if not self.calls:
            return
        launches = dict(zip(self.launch_id, zip(self.launch_us, self.launch_thread, strict=True), strict=True))
        calls = {thread: sorted(found, key=lambda call: call[:2]) for thread, found in self.calls.items()}
        known = list(self.collectives)
        for i, place in enumerate(self.collective):
            if place < 0 or known[place].said or self.correlation[i] not in launches:
                continue
            at_us, thread = launches[self.correlation[i]]
            mine = calls.get(thread, [])
            before = bisect_right(mine, at_us, key=lambda call: call[0])
            around = [said for _, end, said in mine[max(before - _NESTED, 0) : before] if end >= at_us]
            kinds = [said.kind for said in around if said.kind != "other"]
            kind = known[place].kind if known[place].kind not in _SHARED or not kinds else kinds[-1]
            meta = replace(next((call for call in reversed(around) if call.said), known[place]), kind=kind)
            meta = replace(meta, said=meta.said or bool(kinds))
            self.collective[i] = self.collectives.setdefault(meta, len(self.collectives))

    def _annotation(self, on_device: bool, name: str, start: float, length: float) -> None:
        if name.startswith(_STEP):
            steps = self.device_steps if on_device else self.host_steps
            known = steps.get(name, (start, start + length))
            steps[name] = (min(known[0], start), max(known[1], start + length))
        elif on_device and name.startswith("Optimizer.step"):
            self.optimizer_us.append((start, start + length))


def _is_call(name: Any) -> bool:
    return isinstance(name, str) and (name == "record_param_comms" or name.startswith("nccl:"))


def _is_short(length_us: Any) -> bool:
    return isinstance(length_us, (int, float)) and length_us < _LONG_HOST_US


def _time(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) <= _LATEST_US else None


def _int(value: Any) -> int:
    """A whole number that fits a column; -1 for anything else."""
    if isinstance(value, str) and value.isdigit() and len(value) < 18:
        return int(value)
    return value if isinstance(value, int) and abs(value) < 2**62 else -1


def _collective(name: str, args: Mapping[str, Any]) -> Collective:
    said = args.get("Collective name")
    kind = collective_of(said) if isinstance(said, str) else "other"
    if kind == "other":  # NCCL sends all-to-all traffic by the kernel of its messages, so that the record decides
        kind = collective_of(name)
    size = _int(args.get("Group size"))
    elements = max(_int(args.get("In msg nelems")), _int(args.get("Out msg nelems")), 0)
    group = args.get("Process Group Description")
    return Collective(
        kind=kind,
        group=group[:100] if isinstance(group, str) else "",
        group_size=size if size > 0 else None,
        elements=float(elements),
        said=isinstance(said, str),
    )


def read_trace(path: str) -> Recording:
    """The kernels of a trace.

    Raises:
        InputFileError: it is no trace, or has no kernels of a device.
    """
    out = Recording()
    keys: list[str] = []
    try:
        for key, value in events_of(path):
            if key != "event":
                keys.append(key)
                if key in ("distributedInfo", "deviceProperties"):
                    out.header[key] = value
            elif isinstance(value, dict):
                out.add(value)
    except BrokenJson as error:
        out.cut = str(error)
    out.name_kernels_by_calls()
    if not out.events:
        if out.cut:
            raise InputFileError(path, f"is no readable trace: {out.cut}", hint=HINT)
        listed = first_few([shorten(key, 40) for key in keys], 5)
        raise InputFileError(path, "has no trace events" + (f" (keys: {listed})" if listed else ""), hint=HINT)
    if not out.start_us:
        cut = f"; {out.cut}" if out.cut else ""
        damaged = f", {out.damaged} of them kernels without a usable time" if out.damaged else ""
        raise InputFileError(
            path,
            f"has {out.events} events{damaged}, but no kernel of a device{cut}",
            hint="record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        )
    return out


@dataclass(frozen=True, slots=True)
class Columns:
    """The kernels of one device in the order of their starts, in seconds from the first."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    name: NDArray[np.int64]
    stream: NDArray[np.int64]
    collective: NDArray[np.int64]
    launched_s: NDArray[np.float64]
    """Start of the launch on the host; NaN: unknown."""
    zero_us: float
    devices: int


def columns_of(recording: Recording) -> Columns:
    """Columns of the device with most kernel time, sorted by start."""
    devices = np.frombuffer(recording.device, dtype=np.int64)
    lengths = np.frombuffer(recording.length_us, dtype=np.float64)
    found, index = np.unique(devices, return_inverse=True)
    busiest = int(np.argmax(np.bincount(index, weights=lengths)))
    mine = np.flatnonzero(index == busiest)
    starts = np.frombuffer(recording.start_us, dtype=np.float64)[mine]
    order = mine[np.argsort(starts, kind="stable")]
    start_us = np.frombuffer(recording.start_us, dtype=np.float64)[order]
    zero = float(start_us[0])
    start_s = (start_us - zero) * 1e-6
    launched = _launched(recording, np.frombuffer(recording.correlation, dtype=np.int64)[order])
    return Columns(
        start_s=start_s,
        end_s=start_s + lengths[order] * 1e-6,
        name=np.frombuffer(recording.name, dtype=np.int64)[order],
        stream=np.frombuffer(recording.stream, dtype=np.int64)[order],
        collective=np.frombuffer(recording.collective, dtype=np.int64)[order],
        launched_s=(launched - zero) * 1e-6,
        zero_us=zero,
        devices=len(found),
    )


def _launched(recording: Recording, correlations: NDArray[np.int64]) -> NDArray[np.float64]:
    if not recording.launch_id:
        return np.full(len(correlations), np.nan)
    ids = np.frombuffer(recording.launch_id, dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids[order], correlations), len(ids) - 1)
    known = (ids[order][at] == correlations) & (correlations >= 0)
    return np.where(known, np.frombuffer(recording.launch_us, dtype=np.float64)[order][at], np.nan)
