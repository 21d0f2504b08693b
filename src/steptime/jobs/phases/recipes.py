"""Table of recipes: the passes of models over sequences, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

POLICY, REFERENCE, REWARD, CRITIC = "policy", "reference", "reward", "critic"
GENERATE, FORWARD, TRAIN = "generate", "forward", "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One pass of one model."""

    name: str
    role: str
    kind: str
    """:data:`GENERATE`; :data:`FORWARD`: a forward pass; :data:`TRAIN`: forward, backward and update."""
    share: float = 1.0
    """Sequences of the phase over sequences of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A way to train from preferences or rewards."""

    title: str
    phases: tuple[Phase, ...]
    samples: int
    """Default number of sequences per prompt."""
    fixed: bool
    """True: the user cannot change ``samples``."""
    source: str

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of all models of the recipe."""
        return tuple(dict.fromkeys(phase.role for phase in self.phases))


def _update(role: str = POLICY) -> Phase:
    return Phase(name="update" if role == POLICY else f"update of the {role}", role=role, kind=TRAIN)


def _score(role: str, share: float = 1.0) -> Phase:
    return Phase(name=f"{role} scores", role=role, kind=FORWARD, share=share)


_OLD: Final = Phase(name="log-probabilities", role=POLICY, kind=FORWARD)
_GENERATE: Final = Phase(name="generation", role=POLICY, kind=GENERATE)

RECIPES: Final = {
    "dpo": Recipe(
        title="direct preference optimisation: a chosen and a rejected response",
        phases=(_score(REFERENCE), _update()),
        samples=2,
        fixed=True,
        source="Rafailov et al., arXiv 2305.18290",
    ),
    "orpo": Recipe(
        title="odds-ratio preference optimisation: pairs without a reference",
        phases=(_update(),),
        samples=2,
        fixed=True,
        source="Hong et al., arXiv 2403.07691",
    ),
    "simpo": Recipe(
        title="simple preference optimisation: pairs without a reference",
        phases=(_update(),),
        samples=2,
        fixed=True,
        source="Meng et al., arXiv 2405.14734",
    ),
    "kto": Recipe(
        title="Kahneman-Tversky optimisation: single responses, and mismatched ones for the divergence",
        phases=(_score(REFERENCE, 2.0), _OLD, _update()),
        samples=1,
        fixed=True,
        source="Ethayarajh et al., arXiv 2402.01306, section 4",
    ),
    "ppo": Recipe(
        title="proximal policy optimisation with a reward model and a critic",
        phases=(_GENERATE, _OLD, _score(REFERENCE), _score(REWARD), _score(CRITIC), _update(), _update(CRITIC)),
        samples=1,
        fixed=False,
        source="Ouyang et al., arXiv 2203.02155; Schulman et al., arXiv 1707.06347",
    ),
    "grpo": Recipe(
        title="group-relative policy optimisation: several responses of a prompt, no critic",
        phases=(_GENERATE, _OLD, _score(REFERENCE), _score(REWARD), _update()),
        samples=8,
        fixed=False,
        source="Shao et al., arXiv 2402.03300",
    ),
}
"""Name -> recipe."""

LOGITS_OF_RESPONSES: Final = {"grpo": ("trl", "ms-swift")}
"""Recipe -> software whose trainer computes logits of response tokens only (`logits_to_keep` of GRPOTrainer)."""
