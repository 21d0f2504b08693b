"""Searches of cheaper graphs on real models: cost against the start, time.

    python benchmarks/bench_rewrite_search.py [--write] [--only NAME] [--search NAME ...]

Every search has the same moves and the same cost model: the predicted time of the step on the device. MetaFlow and TASO
have their alpha of 1.05 and their budget of 1,000 graphs (MetaFlow in each part). ``--write`` writes
``benchmarks/rewrite_search.md``.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
warnings.filterwarnings("ignore")

import torch  # noqa: E402

from models.suite import SUITE  # noqa: E402
from steptime.hardware import device_within  # noqa: E402
from steptime.rewrite.flow import Flow  # noqa: E402
from steptime.rewrite.search.run import Options, Searched, searched  # noqa: E402
from steptime.rewrite.search.space import operators  # noqa: E402
from steptime.rewrite.trace import trace  # noqa: E402

DEVICES: Final = ("v100-sxm2-32gb", "h100-sxm")
SEARCHES: Final = ("template", "greedy", "metaflow", "taso", "recommended")
Built = tuple[Any, Any]


def larger_bert() -> Built:
    """BERT of 24 layers, 128 tokens: twice the blocks of the suite's, for the time that equal blocks take."""
    from models.bert import Bert

    tokens = torch.randint(0, 30522, (1, 128))
    return Bert(24, 768, 12, 30522, 512), (tokens, torch.zeros_like(tokens))


MODELS: Final[dict[str, Callable[[], Built]]] = {**SUITE, "BERT, 24 layers": larger_bert}
"""Name -> how it is built."""
LONG: Final = "NasNet-A"
"""1,150 operators, none of them in equal blocks: a search of it ends at the limit of 120 s."""


@dataclass(frozen=True)
class Row:
    """One search of one model on one device."""

    model: str
    device: str
    operators: int
    search: str
    found: Searched
    cpu_s: float

    def cells(self) -> str:
        """A row of the table."""
        best = self.found.found
        proof = "" if best.bound is None else "yes"
        head = f"{self.model} | {self.device} | {self.operators} | {self.search}"
        costs = f"{best.cost * 1e6:,.1f} | {best.cost / self.found.start:.3f} | {proof}"
        return f"| {head} | {costs} | {best.graphs:,} | {self.cpu_s:.1f} |"


def flow_of(build: Callable[[], Built]) -> Flow:
    """The graph of a model's forward pass on CUDA."""
    module, inputs = build()
    with torch.no_grad():
        return trace(module.eval(), inputs, target="cuda").flow


def rows(models: list[str], searches: list[str]) -> Iterator[Row]:
    """Every search of every model on every device."""
    for model in models:
        flow = flow_of(MODELS[model])
        for device in DEVICES:
            for search in searches:
                began = time.process_time()
                found = searched(flow, device_within(device), Options(search=search, everything=True, limit_s=120.0))
                cpu_s = time.process_time() - began
                row = Row(model, device, operators(flow), search, found, cpu_s)
                print(row.cells(), flush=True)
                yield row


HEAD: Final = """# Searches of cheaper graphs

Written by `python benchmarks/bench_rewrite_search.py --write`; one CPU thread. Cost: predicted time of the forward pass
in microseconds, with every chosen move made (`--all`); ratio: to the graph as captured. *Proved*: every graph that the
moves reach was priced. CPU s: all rounds. MetaFlow and TASO: alpha 1.05, 1,000 graphs. NasNet-A (`--only NasNet-A`), of
1,150 operators, is not in the table: each of its searches ends at the limit of 120 s (on a V100: greedy at 0.666 of its
start, MetaFlow at 0.660).

| model | device | operators | search | cost | ratio | proved | graphs | CPU s |
|---|---|--:|---|--:|--:|---|--:|--:|
"""


def main() -> None:
    """Print the rows, and write them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="*", default=[name for name in MODELS if name != LONG], choices=list(MODELS))
    parser.add_argument("--search", nargs="*", default=list(SEARCHES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = list(rows(given.only, given.search))
    if given.write:
        (HERE / "rewrite_search.md").write_text(HEAD + "\n".join(row.cells() for row in found) + "\n")


if __name__ == "__main__":
    main()
