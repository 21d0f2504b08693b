"""Results of benchmarks as pages: links to ``../benchmarks/NAME.md`` lead to copies within the documentation."""

from pathlib import Path

from sphinx.application import Sphinx

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks"


def write_results(folder: Path) -> None:
    """Copies of all results, as pages of no table of contents."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in RESULTS.glob("*.md"):
        (folder / path.name).write_text(f"---\norphan: true\n---\n\n{path.read_text('utf-8')}", encoding="utf-8")


def to_copies(_app: Sphinx, _name: str, source: list[str]) -> None:
    """The text of a page with links to the copies."""
    source[0] = source[0].replace("](../benchmarks/", "](/generated/benchmarks/")


def setup(app: Sphinx) -> dict[str, bool]:
    """Enters the extension."""
    app.connect("source-read", to_copies)
    return {"parallel_read_safe": True}
