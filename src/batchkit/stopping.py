"""When a sample ends, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .text import OutputText
    from .types import FinishReason, Request

__all__ = ["advance"]


def advance(request: Request, output: list[int], text: OutputText | None) -> FinishReason | None:
    """Take the newest token of a sample into its text and decide whether it ends the sample.

    Called once for each token. A stop token ends it once there are more than ``min_tokens`` tokens; its id stays in
    the output, its text is left out unless ``include_stop_str_in_output``. A stop token or stop string that comes with
    the very last token allowed is ``"stop"``, not ``"length"``.

    Args:
        request: what was asked for.
        output: the tokens so far, the newest one last.
        text: the sample's text, or None if no text is wanted; finished here if the sample ends.

    Returns:
        ``"stop"``, ``"length"``, or None if it goes on.
    """
    token_id, num_output = output[-1], len(output)
    stops = token_id in request.stop_token_ids and num_output > request.params.min_tokens
    if text is not None and (not stops or request.params.include_stop_str_in_output):
        stops = text.append(token_id, num_output) or stops
    reason: FinishReason | None = "stop" if stops else "length" if num_output >= request.max_tokens else None
    if reason is not None and text is not None:
        text.finish()
    return reason
