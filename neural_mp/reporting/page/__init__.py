"""The HTML page of a run."""

from neural_mp.reporting.page.document import (
    build_comparison_page,
    cell_of,
    page_of,
    report_cell,
    write_page,
)

__all__ = ["build_comparison_page", "cell_of", "page_of", "report_cell", "write_page"]
