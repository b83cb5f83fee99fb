"""The HTML page of a run."""

from neural_mp.reporting.page.document import (
    Surroundings,
    build_comparison_page,
    build_html_page,
    cell_of,
    page_header,
    page_of,
    report_cell,
    write_page,
)

__all__ = [
    "Surroundings",
    "build_comparison_page",
    "build_html_page",
    "cell_of",
    "page_header",
    "page_of",
    "report_cell",
    "write_page",
]
