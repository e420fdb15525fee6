"""Where files are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$DUSTIN_CACHE`, or `~/.cache/dustin_compile`. It may not exist yet."""
    return Path(os.environ.get("DUSTIN_CACHE") or Path.home() / ".cache" / "dustin_compile")
