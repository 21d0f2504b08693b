"""Capture every architecture of tests/public_models, run its narrow form for real, and write docs/public_models.md.

Each model is captured at its real width and compared with its module, then captured and run in its narrow form: FLOPs
against torch.utils.flop_counter, peak memory against the events of PyTorch's CPU allocator. Each has a process of its
own with limits of time and memory; what is done is kept in the journal, and done again only with --again.

usage: scripts/public_models [--only TEXT] [--again] [--journal FILE] [--capture-only] [--write]
                             [--seconds N]
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import multiprocessing
import re
import resource
import textwrap
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

MEMORY_BYTES = 9 * 2**30
LARGEST_RUN = 3e8
"""Parameters of the largest narrow model that is run."""
PAGE = ROOT / "docs" / "public_models.md"


def examined(name: str, capture_only: bool, journal: str) -> dict[str, Any]:
    """What one architecture gave. The capture is kept before the run, which may take longer than its limit."""
    import torch

    from public_models import ROWS, loss_of
    from steptime.captured.record import capture
    from steptime.captured.record.fake import build
    from steptime.errors import UserError

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    row = ROWS[name]
    version = __import__(row.package).__version__.split("+")[0]
    out: dict[str, Any] = {"name": name, "area": row.area, "package": f"{row.package} {version}"}
    options = {"optimizer": "adamw", "loss": loss_of, **row.options}
    began = time.process_time()
    try:
        module, inputs = build(row.real)
        out["built_s"] = time.process_time() - began
        out["module_parameters"] = sum(p.numel() for p in module.parameters())
        program = capture(module, inputs, name=name, **options)
    except UserError as error:
        return {**out, "refused": str(error)}
    out |= {
        "parameters": program.parameter_count, "calls": len(program.calls), "folded": list(program.folded),
        "assumed": list(program.assumed), "seconds": time.process_time() - began,
    }  # fmt: skip
    if capture_only:
        return out
    keep(out | {"not_run": "took too long"}, journal)
    return out | run(row, None if row.narrow else program, options)


def run(row: Any, program: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The narrow form, captured unless that was done, and run."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from measured_memory import peak_bytes
    from recorded import excess_of_grouped_weights, full_flops
    from steptime.captured.graph.liveness import Liveness
    from steptime.captured.record import capture
    from steptime.captured.record.training import OPTIMIZERS

    torch.manual_seed(0)
    module, inputs = row.small()
    if sum(p.numel() for p in module.parameters()) > LARGEST_RUN:
        return {"too_large": True}
    training = options.get("training", True)
    try:
        program = program or capture(module, inputs, name=row.name, **options)
    except Exception as error:
        return {"narrow_refused": str(error)}
    ours: dict[str, float] = collections.Counter()
    for call in program.calls:
        if not call.view:
            ours[call.node.op] += float(full_flops(call.node))
    module.train(training)
    try:
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
            output = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
            if training:
                options["loss"](output).backward()
    except Exception as error:
        return {"ours": {k: v for k, v in ours.items() if v}, "not_run": f"{type(error).__name__}: {error}"[:300]}
    theirs = {str(op).rpartition(".")[2]: flops for op, flops in counter.get_flop_counts().get("Global", {}).items()}
    out: dict[str, Any] = {"ours": {k: v for k, v in ours.items() if v}, "theirs": theirs}
    out["excess_of_grouped_weights"] = excess_of_grouped_weights(program)
    module.zero_grad(set_to_none=True)
    if training:
        del output
        peak = Liveness(program).peak().size_bytes
        measured = peak_bytes(lambda: rebuilt(row), OPTIMIZERS["adamw"], options["loss"]).allocator_bytes
        out |= {"peak_bytes": peak, "measured_bytes": measured}
    return out


def rebuilt(row: Any) -> Any:
    """The narrow form anew, with the same random numbers."""
    import torch

    torch.manual_seed(0)
    return row.small()


def child(name: str, journal: str, capture_only: bool) -> None:
    """One architecture in a process of its own."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        found = examined(name, capture_only, journal)
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        found = {"name": name, "failed": f"{type(error).__name__}: {error}"[:400]}
        found["at"] = f"{place.filename}:{place.lineno}"
    keep(found, journal)


def keep(found: dict[str, Any], journal: str) -> None:
    """Append a result."""
    with Path(journal).open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def known(journal: str) -> dict[str, dict[str, Any]]:
    """Results by name, the last one of each."""
    path = Path(journal)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def is_done(record: dict[str, Any] | None, capture_only: bool) -> bool:
    """Whether a record says all that is asked for."""
    if record is None or "failed" in record:
        return False
    return capture_only or bool({"refused", "narrow_refused", "theirs", "not_run", "too_large"} & set(record))


def examine_all(names: list[str], given: argparse.Namespace) -> None:
    """Each in a process that starts with the packages loaded."""
    for package in ("public_models", "transformers", "timm", "diffusers", "torch_geometric.nn"):
        importlib.import_module(package)
    context = multiprocessing.get_context("fork")
    journal, seconds = given.journal, given.seconds
    for name in names:
        if not given.again and is_done(known(journal).get(name), given.capture_only):  # perhaps by another run
            continue
        process = context.Process(target=child, args=(name, journal, given.capture_only))
        process.start()
        process.join(seconds)
        if process.is_alive() or process.exitcode:
            why = f"took more than {seconds:.0f} s" if process.is_alive() else f"ended with {process.exitcode}"
            process.kill()
            process.join()
            if "parameters" not in known(journal).get(name, {}):
                keep({"name": name, "failed": why}, journal)
        found = known(journal)[name]
        print(f"{name:28}", found.get("refused") or found.get("failed") or found.get("narrow_refused") or "captured",
              f"{found.get('seconds', 0):.1f} s", flush=True)  # fmt: skip


HEAD = """# Public architectures

Architectures of public packages, built from their configurations and captured by one command,
`scripts/public_models --write`, which writes this page.

Each is captured at the width of its configuration, with fewer of the blocks that repeat and AdamW, on a CPU.
*Parameters* are those of the capture, and the module's where they differ. A narrow form of it (where
`tests/public_models` has settings for one, else the same form) is then captured and run for real. The *FLOPs* of
its forward and backward pass are compared with `torch.utils.flop_counter`, the *peak* of its memory with the events
of PyTorch's CPU allocator in the second step. The narrow forms of the first six speech models skip no layers at random:
which layers a real run skips differs from run to run.
"""

NAMED = {
    "_grouped_mm": "grouped products", "_scaled_dot_product_flash_attention_for_cpu": "fused attention of the CPU",
    "mv": "products with vectors", "addmv": "products with vectors", "dot": "products of vectors",
    "mkldnn_rnn_layer": "recurrent layers",
}  # fmt: skip
"""Operators with products that PyTorch's counter does not count."""


def flops_text(record: dict[str, Any]) -> str:
    """Whether the FLOPs are those of PyTorch's counter; what differs, and why."""
    if "theirs" not in record:
        return "not run"
    from torch.utils.flop_counter import flop_registry

    counted = {operator.__name__ for operator in flop_registry if hasattr(operator, "__name__")}
    ours, theirs = record["ours"], dict(record["theirs"])
    excess = record.get("excess_of_grouped_weights", 0)
    if excess:
        theirs["convolution_backward"] -= excess
    wrong = [f"{op} {ours.get(op, 0):.4g} / {theirs.get(op, 0):.4g}" for op in sorted(counted & {*ours, *theirs})
             if ours.get(op, 0) != theirs.get(op, 0)]  # fmt: skip
    linear = [sum(each.get(op, 0) for op in ("mm", "addmm")) for each in (ours, theirs)]
    added = "; some products with and without a bias the other way round" if wrong else ""
    if wrong and not (all(w.split()[0] in ("mm", "addmm") for w in wrong) and linear[0] == linear[1]):
        return "differ: " + ", ".join(wrong)
    more = {NAMED.get(op.removesuffix("_backward"), op): 0.0 for op in ours if op not in counted}
    for op, flops in ours.items():
        if op not in counted:
            more[NAMED.get(op.removesuffix("_backward"), op)] += flops / sum(ours.values())
    words = [f"{share:.1%} of ours {name}" for name, share in more.items()]
    return "equal" + added + ("; groups" if excess else "") + (f"; {', '.join(words)}" if words else "")


def peak_text(record: dict[str, Any]) -> str:
    """Predicted peak against the measured one."""
    if "measured_bytes" not in record:
        return ""
    return f"{record['peak_bytes'] / record['measured_bytes'] - 1:+.2%}"


def short(text: str) -> str:
    """A reason in one cell, with the names of files without their folders."""
    plain = re.sub(r"/\S*/", "", " ".join(text.split())).replace("|", "\\|")
    return plain if len(plain) <= 240 else plain[:237] + "..."


def only_forward(name: str) -> str:
    """What is said of an architecture that is captured without its backward pass."""
    from public_models import ROWS

    return "" if ROWS[name].options.get("training", True) else ", forward pass only"


def row_of(record: dict[str, Any]) -> str:
    """One line of the table."""
    refused = record.get("refused") or record.get("failed")
    captured = f"refused: {short(refused)}" if refused else f"yes{only_forward(record['name'])}"
    if record.get("assumed"):
        captured += "; taken as true: " + short("; ".join(sorted({a.partition(" (")[0] for a in record["assumed"]})))
    parameters = f"{record.get('parameters', record.get('module_parameters', 0)):,}"
    if not refused and record["parameters"] != record["module_parameters"]:
        parameters += f" (module: {record['module_parameters']:,})"
    cells = [record["name"], record.get("area", ""), record.get("package", ""), captured, parameters,
             ", ".join(record.get("folded", ())) or "no", short(flops_text(record)), peak_text(record)]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def page(records: list[dict[str, Any]]) -> str:
    """The table with its sums."""
    captured = [r for r in records if "parameters" in r]
    exact = sum(r["parameters"] == r["module_parameters"] for r in captured)
    ran = [r for r in captured if "theirs" in r]
    texts = [flops_text(r) for r in ran]
    equal = sum(text.startswith("equal") for text in texts)
    swapped = sum("the other way round" in text for text in texts)
    forward = sum(bool(only_forward(r["name"])) for r in captured)
    peaks = [abs(r["peak_bytes"] / r["measured_bytes"] - 1) for r in captured if "measured_bytes" in r]
    sums = (
        f"{len(captured)} of {len(records)} architectures are captured ({len(captured) / len(records):.1%}), "
        f"{forward} of them without the backward "
        f"pass, {sum(bool(r['folded']) for r in captured)} folded. Parameters are exact in {exact}. Of {len(ran)} "
        f"that were run the FLOPs equal PyTorch's in {equal}, in {equal - swapped} "
        f"operator by operator. Of {len(peaks)} measured peaks "
        f"{sum(p <= 0.01 for p in peaks)} agree within 1 %, {sum(p <= 0.001 for p in peaks)} within 0.1 %."
    )
    notes = (
        "*groups*: PyTorch's counter takes the gradient of the weights of a grouped convolution as if there were one "
        "group; its count is set right before it is compared. Shares are of products that the counter does not count."
    )
    head = "| model | area | package | captured | parameters | folded | FLOPs | peak |"
    table = [head, "|---|---|---|---|---|---|---|---|", *map(row_of, records)]
    return "\n".join([HEAD, *textwrap.wrap(sums, 125), "", *textwrap.wrap(notes, 125), "", *table, ""])


def main() -> int:
    """Examine what is asked for; write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="part of a name or area")
    parser.add_argument("--again", action="store_true", help="examine again what is in the journal")
    parser.add_argument("--journal", default=str(ROOT / "build" / "public_models.jsonl"))
    parser.add_argument("--capture-only", action="store_true", help="run nothing for real")
    parser.add_argument("--write", action="store_true", help="write docs/public_models.md")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit for one architecture")
    given = parser.parse_args()
    from public_models import ROWS

    Path(given.journal).parent.mkdir(parents=True, exist_ok=True)
    wanted = [n for n, row in ROWS.items() if not given.only or given.only.lower() in f"{n} {row.area}".lower()]
    examine_all(wanted, given)
    if given.write:
        records = known(given.journal)
        PAGE.write_text(page([records[name] for name in ROWS if name in records]), encoding="utf-8")
    return 0
