"""Formulas as MathML, which every current browser draws by itself: no script, no fonts, no network."""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def _converted(node: nodes.Element, display: str) -> str:
    latex = node.astext()
    try:
        return convert(latex, display=display)
    except Exception as error:
        logger.warning("formula %r: %s", latex, error, location=node)
        return f"<code>{nodes.unescape(latex)}</code>"


def inline(translator: Any, node: nodes.math) -> None:
    """A formula inside a line."""
    translator.body.append(_converted(node, "inline"))
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    """A formula on its own line."""
    translator.body.append(f'<div class="math">{_converted(node, "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
