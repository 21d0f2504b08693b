"""The Python API: the commands print what these functions return.

Names are loaded on first use, because functions for real models (``fit``) import more than the others. Packages add
functions under the entry point ``steptime.api``, as the laboratory adds ``limits`` and ``consistency``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from steptime.registry import public

if TYPE_CHECKING:
    from steptime.api.calls import estimate as estimate
    from steptime.api.comparison import Difference as Difference
    from steptime.api.comparison import diff as diff
    from steptime.api.ledgers import Ledger as Ledger
    from steptime.api.ledgers import ledger as ledger
    from steptime.api.searches import plan as plan
    from steptime.captured.fitting import fit as fit
    from steptime.simulation.collectives.times import Collective as Collective
    from steptime.simulation.collectives.times import collective as collective
    from steptime.simulation.run import SimulatedStep as SimulatedStep
    from steptime.simulation.run import simulate as simulate
    from steptime.study.fleet import fleet as fleet
    from steptime.study.guide.decisions import Guide as Guide
    from steptime.study.guide.decisions import guide as guide
    from steptime.study.shadow import shadow as shadow

#: Public name -> place of its definition.
PLACES: Final = {
    "Collective": "steptime.simulation.collectives.times:Collective",
    "Difference": "steptime.api.comparison:Difference",
    "Guide": "steptime.study.guide.decisions:Guide",
    "Ledger": "steptime.api.ledgers:Ledger",
    "SimulatedStep": "steptime.simulation.run:SimulatedStep",
    "collective": "steptime.simulation.collectives.times:collective",
    "diff": "steptime.api.comparison:diff",
    "estimate": "steptime.api.calls:estimate",
    "fit": "steptime.captured.fitting:fit",
    "fleet": "steptime.study.fleet:fleet",
    "guide": "steptime.study.guide.decisions:guide",
    "ledger": "steptime.api.ledgers:ledger",
    "plan": "steptime.api.searches:plan",
    "shadow": "steptime.study.shadow:shadow",
    "simulate": "steptime.simulation.run:simulate",
}

__all__ = sorted(PLACES)
__getattr__, __dir__ = public(__name__, PLACES, "steptime.api")
