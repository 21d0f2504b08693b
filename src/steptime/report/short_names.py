"""Names of operators and modules as they fit into a plot or a column."""

from __future__ import annotations

LEAST = 12


def short_operator(name: str, room: int = 40) -> str:
    """The name of an operator; where it is still too long, words before the last one go.

    >>> short_operator("_scaled_dot_product_flash_attention_for_cpu_backward")
    'sdpa_flash_backward'
    >>> short_operator("max_pool2d_with_indices_backward", 24)
    'max_pool2d.._backward'
    """
    short = name.replace("_scaled_dot_product_", "sdpa_").replace("_attention", "").replace("_for_cpu", "")
    if len(short) <= max(room, LEAST):
        return short
    head, _, last = short.rpartition("_")
    words = head.split("_")
    while len(words) > 1 and len("_".join(words)) + len(last) + 3 > room:
        words.pop()
    return _cut(f"{'_'.join(words)}.._{last}", room)


def short_path(path: str, room: int) -> str:
    """The path of a module; where it is too long, its first names go.

    >>> short_path("model.language_model.layers.*.self_attn.q_proj", 18)
    '..self_attn.q_proj'
    """
    if len(path) <= max(room, LEAST):
        return path
    words = path.split(".")
    while len(words) > 1 and len(".".join(words)) + 2 > room:
        words.pop(0)
    return _cut(f"..{'.'.join(words)}", room)


def _cut(text: str, room: int) -> str:
    room = max(room, LEAST)
    return text if len(text) <= room else f"{text[: room - 2]}.."
