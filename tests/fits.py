"""The fit of the package as one file, as a user's own fit is written."""

from __future__ import annotations

from steptime.plan.framework_file import FILES, PACKAGED

STACKS = (
    *("axolotl", "litgpt", "llama-factory", "ms-swift", "paddlenlp"),
    *("peft", "torchtune", "transformers", "trl", "unsloth"),
)
"""Fine-tuning stacks of the package."""


def fit_text() -> str:
    """Text of the shared file, and what was fitted of each framework."""
    parts = [PACKAGED.read_text(encoding="utf-8").rstrip()]
    for path in sorted(FILES.glob("*.toml")):
        _, found, values = path.read_text(encoding="utf-8").partition("[fitted]")
        if found:
            values = values.partition("\n")[2].replace("[fitted.doubts]", f'[framework."{path.stem}".doubts]')
            parts.append(f'[framework."{path.stem}"]\n{values.rstrip()}')
    return "\n\n".join(parts) + "\n"
