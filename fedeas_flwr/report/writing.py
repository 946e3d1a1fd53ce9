"""A report as files: one HTML page that needs nothing else, or Markdown with its pictures beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedeas_flwr.paths import atomic_write
from fedeas_flwr.report.document import make_document
from fedeas_flwr.report.groups import Group
from fedeas_flwr.report.page import as_html, as_markdown, as_png, as_svg


def write_report(
    groups: Sequence[Group], left_out: Sequence[str], page: Path | None = None, folder: Path | None = None
) -> list[Path]:
    """Write a report as one page, as a folder with report.md and every picture as SVG and PNG, or both.

    Returns
    -------
    list of Path
        What to open.
    """
    if page is None and folder is None:
        return []
    document, written = make_document(groups, left_out), []
    if page:
        atomic_write(page, as_html(document).encode())
        written.append(page)
    if folder:
        for picture in (picture for section in document.sections for picture in section.pictures):
            atomic_write(folder / f"{picture.name}.svg", as_svg(picture.figure))
            atomic_write(folder / f"{picture.name}.png", as_png(picture.figure))
        atomic_write(folder / "report.md", as_markdown(document).encode())
        written.append(folder / "report.md")
    return written
