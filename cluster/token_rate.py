"""How many tokens were generated, and how many a second lately."""

from __future__ import annotations

import time
from collections import deque


class TokenRate:
    """Counts tokens.

    Attributes:
        total: Since `begin`.
    """

    def __init__(self, span_seconds: float) -> None:
        """`span_seconds` is what `per_second` looks back."""
        self.total = 0
        self._span = span_seconds
        # When, and how many.
        self._recent: deque[tuple[float, int]] = deque()
        self._began: float | None = None

    def begin(self) -> None:
        """Count from here on."""
        self.total = 0
        self._recent.clear()
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since `begin`; 0 before."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def count(self, tokens: int) -> None:
        """So many more."""
        if not tokens:
            return
        self.total += tokens
        now = time.monotonic()
        self._recent.append((now, tokens))
        self._forget_before(now - self._span)

    def per_second(self) -> float:
        """Over the last span, or since `begin` if that is shorter."""
        if self._began is None:
            return 0.0
        now = time.monotonic()
        self._forget_before(now - self._span)
        return sum(tokens for _, tokens in self._recent) / max(min(now - self._began, self._span), 1e-3)

    def _forget_before(self, moment: float) -> None:
        while self._recent and self._recent[0][0] < moment:
            self._recent.popleft()
