"""A step trace as a picture: in a browser, in a terminal, in a trace viewer; and the same steps once more.

`view` makes of a `batchkit.trace.Trace` what all of them draw. Nothing here needs a model, a device or a network.
"""

from __future__ import annotations

from .html import page
from .model import Figures, Lane, Span, StepView, View, view
from .perfetto import chrome_trace
from .replay import Replayed, replay
from .svg import picture
from .text import drawing

__all__ = [
    "Figures",
    "Lane",
    "Replayed",
    "Span",
    "StepView",
    "View",
    "chrome_trace",
    "drawing",
    "page",
    "picture",
    "replay",
    "view",
]
