"""Faults of a single request, which the workflow handles."""

from __future__ import annotations


class PromptTooLongError(ValueError):
    """The prompt leaves no room for a single token in the model's window."""

    def __init__(self, length: int, window: int) -> None:
        super().__init__(f"the prompt has {length} tokens and the window {window}")
        self.length = length
        self.window = window
