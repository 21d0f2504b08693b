"""Sphinx configuration: Markdown pages, formula pages made from the source, MathML for formulas."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

from formula_pages import write_pages  # noqa: E402
from result_pages import write_results  # noqa: E402

import steptime  # noqa: E402

write_pages(HERE / "generated" / "formulas")
write_results(HERE / "generated" / "benchmarks")

project = "steptime"
author = "the steptime authors"
project_copyright = author
release = version = steptime.__version__

extensions = ["myst_nb", "mathml", "result_pages"]
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"
exclude_patterns = ["_build", "_ext"]
nitpicky = True

html_theme = "furo"
html_title = "steptime"
