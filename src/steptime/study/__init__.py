"""Studies: many jobs from one file, run into a store of results that is read as tables.

>>> from steptime import study
>>> small = study.study_of({"job": {"model": "gpt2", "cluster": "dgx-h100", "gpus": [1, 2], "global_batch": 8}})
>>> len(small.points)
2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from steptime.registry import public

if TYPE_CHECKING:
    from steptime.study.file import Study as Study
    from steptime.study.file import read_study as read_study
    from steptime.study.file import study_of as study_of
    from steptime.study.running import Outcome as Outcome
    from steptime.study.running import run as run
    from steptime.study.tables import Results as Results
    from steptime.study.tables import results as results

#: Public name -> place of its definition.
PLACES: Final = {
    "Outcome": "steptime.study.running:Outcome",
    "Results": "steptime.study.tables:Results",
    "Study": "steptime.study.file:Study",
    "read_study": "steptime.study.file:read_study",
    "results": "steptime.study.tables:results",
    "run": "steptime.study.running:run",
    "study_of": "steptime.study.file:study_of",
}

__all__ = sorted(PLACES)
__getattr__, __dir__ = public(__name__, PLACES)
