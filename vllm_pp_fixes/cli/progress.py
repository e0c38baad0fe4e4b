"""What is under way, said on standard error while a command waits."""

from __future__ import annotations

import sys
import time


class Progress:
    """What is under way and for how long, on standard error: one line each, running seconds on a terminal."""

    def __init__(self) -> None:
        self.start = self.shown = time.monotonic()
        self.live = sys.stderr.isatty()

    def __call__(self, doing: str) -> None:
        """Say that something begins."""
        self.end()
        self._show(doing, "" if self.live else "\n")

    def tick(self, doing: str) -> None:
        """Let the seconds run, and wait a moment."""
        time.sleep(0.1)
        if time.monotonic() - self.shown > (1 if self.live else 15):
            self._show(doing, "" if self.live else "\n")

    def end(self) -> None:
        """Leave the terminal clean."""
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _show(self, doing: str, end: str) -> None:
        self.shown = time.monotonic()
        print(
            f"{chr(13) if self.live else ''}[{self.shown - self.start:4.0f} s] {doing}",
            end=end,
            file=sys.stderr,
            flush=True,
        )
