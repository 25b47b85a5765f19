"""The reports as files beside their certificate."""

from pathlib import Path

from d3.report.evidence import Evidence, read, shown
from d3.report.markdown import markdown
from d3.report.page import page
from d3.store import write_atomic


def write_reports(path: Path, out: Path | None = None) -> list[Path]:
    """Make NAME.md and NAME.html from the certificate `path` and the boots beside it; returns the two.

    They lie beside the certificate, or in `out`. Raises D3Error where a file is missing, damaged or was changed.
    """
    return write_from(read(path), path, out or path.parent)


def write_from(evidence: Evidence, path: Path, folder: Path) -> list[Path]:
    """The same from what is in memory. `path`: where the certificate lies; `folder`: where the reports go."""
    file = shown(path)
    made = {".md": markdown(evidence.certificate, file), ".html": page(evidence, file)}
    for suffix, text in made.items():
        write_atomic(folder / f"{path.stem}{suffix}", text)
    return [folder / f"{path.stem}{suffix}" for suffix in made]
