"""Learned corrections against published times of whole models on one GPU, with devices and models left out.

    python benchmarks/bench_predict_gpu.py --sketches FILE.jsonl            prints the tables
    python benchmarks/bench_predict_gpu.py --sketches FILE.jsonl --write    also writes benchmarks/predict_gpu.md and
                                                                            the correction that steptime ships for GPUs

Needs the folder of measurements, PyTorch, Transformers and torchvision. Every module is captured once, into the file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from machine import report
from steptime.captured.cost.timing import Timer
from steptime.estimate.learned import FOLDER, Correction
from steptime.num import Array
from steptime_lab.data_root import require_data
from steptime_lab.learned.additive import Options, fitted, predicted_s
from steptime_lab.learned.data import Rows, rows_of
from steptime_lab.learned.harness import conformal, left_out
from steptime_lab.learned.published import LANGUAGE, Row, read_rows, sketches, unmeasured
from steptime_lab.learned.sketch import Sketch
from steptime_lab.learned.train import written

OPTIONS = Options(hidden=16, epochs=150, batch=16, prior=0.1, offsets=0.005)
PUBLISHED_UNSEEN = ("h100-sxm", "l4", "a100-pcie-80gb")
"""Devices that the published predictor (NeuSight) counts as unseen."""


IMAGE = ("vgg", "resnet", "resnext", "densenet", "squeezenet", "mnasnet", "mobilenet", "shufflenet")
"""Families of image models."""


def architecture(model: str) -> str:
    """Family of an image model, which is left out as a whole; language models are left out one by one."""
    if model in LANGUAGE:
        return model
    return next(name for name in IMAGE if name in model)


def rows_on(rows: Sequence[Row], drawn: dict[str, Sketch], group: Callable[[Row], str]) -> Rows:
    """Rows with the profiles as they are found now."""
    timers: dict[str, Timer] = {}
    for row in rows:
        timers.setdefault(row.device.name, Timer(device=row.device))
    return rows_of([(drawn[row.graph], timers[row.device.name], row.seconds, group(row)) for row in rows])


def line(name: str, predicted_s: Array, measured_s: Array) -> str:
    """Errors as a line of a table."""
    errors = predicted_s / measured_s - 1
    return (
        f"| {name} | {len(errors)} | {100 * abs(errors).mean():.1f} | {100 * np.median(abs(errors)):.1f} | "
        f"{100 * np.median(errors):+.1f} |"
    )


class Tables:
    """Predictions of every row with its group left out."""

    def __init__(self, rows: Sequence[Row], drawn: dict[str, Sketch]) -> None:
        self.rows, self.drawn = rows, drawn
        self.language = np.array([row.model in LANGUAGE for row in rows])
        self.found: dict[str, Array] = {}
        self.own = rows_on(rows, drawn, lambda row: row.device.name)
        self.fit_s: list[float] = []

    def fit(self, rows: Rows) -> Correction:
        """A correction, its CPU time noted."""
        begin = time.process_time()
        found = fitted(rows, OPTIONS)
        self.fit_s.append(time.process_time() - begin)
        return found

    def devices(self) -> None:
        """Leave out each device: its curves are carried over from others, as are those of its times."""
        names = np.array([row.device.name for row in self.rows])
        for key in ("carried over", "additive"):
            self.found[key] = np.zeros(len(names))
        for name in sorted(set(names)):
            device = next(row.device for row in self.rows if row.device.name == name)
            with unmeasured([device]):
                seen = rows_on(self.rows, self.drawn, lambda row: row.device.name)
            for kind in (self.language, ~self.language):
                test, train = np.nonzero(kind & (names == name))[0], np.nonzero(kind & (names != name))[0]
                if not len(test):
                    continue
                mine = seen.only(test)
                self.found["carried over"][test] = mine.analytic_s
                self.found["additive"][test] = predicted_s(self.fit(seen.only(train)), mine)
                print(line(name, self.found["additive"][test], mine.measured_s), flush=True)

    def models(self) -> None:
        """Leave out each language model, and each family of image models."""
        names = np.array([architecture(row.model) for row in self.rows])
        self.found["unseen model"] = np.zeros(len(names))
        for name in sorted(set(names)):
            kind = self.language == (name in LANGUAGE)
            test, train = np.nonzero(kind & (names == name))[0], np.nonzero(kind & (names != name))[0]
            mine = self.own.only(test)
            self.found["unseen model"][test] = predicted_s(self.fit(self.own.only(train)), mine)
            print(line(name, self.found["unseen model"][test], mine.measured_s), flush=True)

    def text(self, left: dict[str, int]) -> list[str]:
        """The page."""
        measured, names = self.own.measured_s, np.array([row.device.name for row in self.rows])
        kinds = np.array([architecture(row.model) for row in self.rows])
        head = ["| what is left out | rows | mean % | median % | bias % |", "| --- | --: | --: | --: | --: |"]
        unseen = self.language & np.isin(names, PUBLISHED_UNSEEN)
        shown = [("language models, own curves of the device, nothing learned", self.language, self.own.analytic_s)]
        for key in ("carried over", "additive"):
            shown += [(f"{key}: device, language models", self.language, self.found[key]),
                      (f"{key}: device, the published predictor's three", unseen, self.found[key]),
                      (f"{key}: device, image models", ~self.language, self.found[key])]  # fmt: skip
        shown += [("additive: model, language", self.language, self.found["unseen model"]),
                  ("additive: family of models, image", ~self.language, self.found["unseen model"])]  # fmt: skip
        text = [*head]
        text += [line(name, found[chosen], measured[chosen]) for name, chosen, found in shown]
        text += ["", "## Devices left out, additive", "", *head]
        for name in sorted(set(names)):
            text.append(line(name, self.found["additive"][names == name], measured[names == name]))
        text += ["", "## Models left out, additive", "", *head]
        text += [line(k, self.found["unseen model"][kinds == k], measured[kinds == k]) for k in sorted(set(kinds))]
        reasons = "; ".join(f"{count}: {why}" for why, count in left.items())
        text += ["", f"Left out of the table: {sum(left.values())} rows ({reasons}).", "",
                 f"A fit takes {np.median(self.fit_s):.0f} s of CPU."]  # fmt: skip
        return text


NOTES = """A device that is left out has the curves that others of its vendor have, carried over by its datasheet, and
no row of its own; a model that is left out has none on any device. Language and image models are fitted
apart. Image models ran 12 images at a time between 2018 and 2021, where the host takes as long as the
device and nobody knows the host: a device that is left out has the mean of all hosts. The best published
predictor has 8.1 to 9.2 % on its unseen devices (H100, L4, A100 80 GB), over 42 models of which six are
mixtures of experts that are not public as they were timed."""


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sketches", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--source", default="", help="rows of this source alone")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import torch

    from public_models.rows import load_torchvision

    load_torchvision()
    torch.set_num_threads(1)
    rows, left = read_rows(require_data("models_single_gpu.csv.gz"))
    rows = [row for row in rows if row.source.startswith(given.source)]
    tables = Tables(rows, sketches(rows, given.sketches, told=print))
    tables.devices()
    tables.models()
    report("predict_gpu", "Whole models on one GPU", "\n".join(tables.text(left)), NOTES)
    if given.write:
        ship(tables)


def ship(tables: Tables) -> None:
    """Write the correction for GPUs: of the language models, with the error and the band of devices left out."""
    language = np.nonzero(tables.language)[0]
    rows = tables.own.only(language)
    found, measured = tables.found["additive"][language], rows.measured_s
    band = conformal(found, measured)
    made = fitted(rows, OPTIONS)
    provenance = {
        "data": "language models timed by NeuSight (ASPLOS 2025), fp32, PyTorch 2.1", "unseen": "GPUs",
        "graphs": len(measured), "devices": sorted(set(rows.machines)), "seed": OPTIONS.seed,
        "covered": round(left_out(found, measured, rows.machines), 4),
    }  # fmt: skip
    error = float(abs(found / measured - 1).mean())
    written(replace(made, name="gpu", band=band, error=error, provenance=provenance), FOLDER / "gpu.json")


if __name__ == "__main__":
    main()
