"""The HTML page of a run."""

from neural_mp.reporting.page.document import (
    cell_of,
    comparison_page,
    page_of,
    report_cell,
    write_page,
)

__all__ = ["cell_of", "comparison_page", "page_of", "report_cell", "write_page"]
