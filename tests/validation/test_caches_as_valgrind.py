"""The simulator against valgrind's cachegrind on compiled C: the same loops over the same addresses."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from steptime_lab.hierarchy.geometry import hierarchy
from steptime_lab.hierarchy.simulate import simulate
from steptime_lab.hierarchy.traces import Shape, Trace, stencil, stream, tiled_matmul

needs = pytest.mark.skipif(
    not (shutil.which("valgrind") and shutil.which("gcc")), reason="valgrind and gcc are not installed"
)
SOURCE = r"""
#include <stdlib.h>
#include <string.h>
static char arena[1 << 24] __attribute__((aligned(1 << 20)));
static volatile char other[1 << 22];
#define A(at) ((double *)(arena + (at)))
static void fill(void) { for (int i = 0; i < sizeof other; i += 64) other[i]; }
int main(int argc, char **argv) {
  int run = argc > 1;
  fill();  /* so that both runs start and end with the same lines in both levels */
  for (int go = 0; go < run; go++) { BODY }
  fill();
  return 0;
}
"""


def missed(folder: Path, body: str, d1: str, last: str) -> tuple[int, int]:
    """Misses of data in both levels that the body of the program adds to one that does nothing."""
    (folder / "kernel.c").write_text(SOURCE.replace("BODY", body))
    subprocess.run(["gcc", "-O1", "-fno-tree-vectorize", "-o", folder / "kernel", folder / "kernel.c"], check=True)
    counts = []
    for arguments in ([], ["run"]):
        done = subprocess.run(
            ["valgrind", "--tool=cachegrind", "--cache-sim=yes", "--cachegrind-out-file=/dev/null", "--I1=32768,8,64",
             f"--D1={d1}", f"--LL={last}", folder / "kernel", *arguments],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        counts.append(
            [
                int(re.search(rf"{name}\s+misses:\s+([\d,]+)", done.stderr)[1].replace(",", ""))  # type: ignore[index]
                for name in ("D1 ", "LLd")
            ]
        )
    return counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]


def matmul_body(n: int, b: int) -> str:
    """The tiled product of `tiled_matmul`, packed, one array behind the other."""
    size = n * n * 8
    return f"""
      double *a = A(0), *b = A({size}), *c = A({2 * size});
      for (int i0 = 0; i0 < {n}; i0 += {b}) for (int j0 = 0; j0 < {n}; j0 += {b}) for (int k0 = 0; k0 < {n}; k0 += {b})
        for (int i = 0; i < {b}; i++) for (int k = 0; k < {b}; k++) {{
          double x = a[i0 * {n} + {b} * k0 + i * {b} + k];
          for (int j = 0; j < {b}; j++)
            c[i0 * {n} + {b} * j0 + i * {b} + j] += x * b[k0 * {n} + {b} * j0 + k * {b} + j];
        }}"""


def unpacked_body(n: int, b: int) -> str:
    size = n * n * 8
    return f"""
      double *a = A(0), *b = A({size}), *c = A({2 * size});
      for (int i0 = 0; i0 < {n}; i0 += {b}) for (int j0 = 0; j0 < {n}; j0 += {b}) for (int k0 = 0; k0 < {n}; k0 += {b})
        for (int i = i0; i < i0 + {b}; i++) for (int k = k0; k < k0 + {b}; k++) {{
          double x = a[i * {n} + k];
          for (int j = j0; j < j0 + {b}; j++) c[i * {n} + j] += x * b[k * {n} + j];
        }}"""


STREAM = """double *b = A(0), *c = A(65536), *a = A(131072);
  for (int p = 0; p < 2; p++) for (int i = 0; i < 8192; i++) a[i] = b[i] + 3 * c[i];"""
STENCIL = """double *a = A(0), *b = A(131072); for (int i = 1; i < 127; i++) for (int j = 1; j < 127; j++)
  b[i * 128 + j] = a[(i - 1) * 128 + j] + a[i * 128 + j - 1] + a[i * 128 + j] + a[i * 128 + j + 1]
    + a[(i + 1) * 128 + j];"""
CASES: dict[str, tuple[Trace, str, str]] = {
    "matmul 64/8": (tiled_matmul((64, 64, 64), (8, 8, 8), 8), matmul_body(64, 8), "8KiB:8,64KiB:16"),
    "matmul 64/16": (tiled_matmul((64, 64, 64), (16, 16, 16), 8), matmul_body(64, 16), "16KiB:8,64KiB:16"),
    "matmul 96/12": (tiled_matmul((96, 96, 96), (12, 12, 12), 8), matmul_body(96, 12), "8KiB:8,64KiB:16"),
    "matmul 96/16": (tiled_matmul((96, 96, 96), (16, 16, 16), 8), matmul_body(96, 16), "16KiB:4,128KiB:8"),
    "unpacked 64/8": (
        tiled_matmul((64, 64, 64), (8, 8, 8), 8, packed=False), unpacked_body(64, 8), "16KiB:8,64KiB:16"
    ),
    "stream": (stream(Shape(n=8192)), STREAM, "8KiB:8,64KiB:16"),
    "stencil": (stencil(Shape(n=128)), STENCIL, "8KiB:8,64KiB:16"),
}  # fmt: skip


@pytest.mark.slow
@needs
@pytest.mark.each("name", list(CASES))
def test_misses_are_those_of_cachegrind(name: str, tmp_path: Path) -> None:
    trace, body, caches = CASES[name]
    ours = simulate(trace, hierarchy(caches))
    d1, last = (f"{c.size_bytes},{c.ways},{c.line_bytes}" for c in hierarchy(caches).caches)
    theirs = missed(tmp_path, body, d1, last)
    for level, count in zip(ours.levels, theirs, strict=True):
        assert level.misses == pytest.approx(count, rel=0.01, abs=8)
