"""Releases of vLLM: which ones the package knows, and how a version is read."""

from __future__ import annotations

import re

OLDEST = "0.17.0"
"""Oldest release of vLLM that the drop-ins were made for."""
NEWEST = "0.33.0"
"""Newest release that the faults were looked for in."""
TESTED = "0.32.0"
"""Newest release that the tests were run on."""


def numbers(version: str) -> tuple[int, ...]:
    """Return the release in `version` as numbers: `(0, 32, 0)` of `0.32.0+cpu`; `(0, 0, 0)` where there is none.

    What comes before a release counts as it: `(0, 34, 0)` of `0.34.dev0`. Builds from a source tree without tags call
    themselves 0.1.devN, whatever they hold: they have none.
    """
    found = None if re.match(r"0\.1\.?dev", version) else re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)


def too_old(version: str) -> bool:
    """Tell whether `version` is a vLLM release older than the oldest that the drop-ins were made for."""
    return numbers("") < numbers(version) < numbers(OLDEST)
