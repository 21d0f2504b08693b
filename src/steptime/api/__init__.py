"""The Python API: what the commands print is what these functions return.

Names are loaded when they are first used: those of real models (``fit``) and of the laboratory (``limits``) import what
the others do without.
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
    from steptime.buying.fleet import fleet as fleet
    from steptime.buying.shadow import shadow as shadow
    from steptime.captured.fitting import fit as fit
    from steptime.collectives.times import Collective as Collective
    from steptime.collectives.times import collective as collective
    from steptime.guide.decisions import Guide as Guide
    from steptime.guide.decisions import guide as guide
    from steptime.lab.limits import Limits as Limits
    from steptime.lab.limits import limits as limits
    from steptime.lab.replicas.updates import Consistency as Consistency
    from steptime.lab.replicas.updates import consistency as consistency
    from steptime.simulation.run import SimulatedStep as SimulatedStep
    from steptime.simulation.run import simulate as simulate

#: Public name -> where it is defined.
PLACES: Final = {
    "Collective": "steptime.collectives.times:Collective",
    "Consistency": "steptime.lab.replicas.updates:Consistency",
    "Difference": "steptime.api.comparison:Difference",
    "Guide": "steptime.guide.decisions:Guide",
    "Ledger": "steptime.api.ledgers:Ledger",
    "Limits": "steptime.lab.limits:Limits",
    "SimulatedStep": "steptime.simulation.run:SimulatedStep",
    "collective": "steptime.collectives.times:collective",
    "consistency": "steptime.lab.replicas.updates:consistency",
    "diff": "steptime.api.comparison:diff",
    "estimate": "steptime.api.calls:estimate",
    "fit": "steptime.captured.fitting:fit",
    "fleet": "steptime.buying.fleet:fleet",
    "guide": "steptime.guide.decisions:guide",
    "ledger": "steptime.api.ledgers:ledger",
    "limits": "steptime.lab.limits:limits",
    "plan": "steptime.api.searches:plan",
    "shadow": "steptime.buying.shadow:shadow",
    "simulate": "steptime.simulation.run:simulate",
}

__all__ = sorted(PLACES)
__getattr__, __dir__ = public(__name__, PLACES)
