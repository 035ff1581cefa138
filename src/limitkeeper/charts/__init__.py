"""Charts as SVG without a plotting library: of the planner's report, of the demo and of the documentation."""

from .frame import Frame
from .line_chart import Line, Mark, line_chart
from .page import html_page
from .svg import Drawing

__all__ = ["Drawing", "Frame", "Line", "Mark", "html_page", "line_chart"]
