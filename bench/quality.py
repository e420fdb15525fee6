"""What a sparse verification loses, against other ways to choose what it reads: `dustin-compile quality`, as a script.

    python bench/quality.py [--contexts 4096,2048,8192] [--budgets 512,256,128] [--profile FILE]... [--layer-skip]

The options are that command's (`--help` lists them). Rows are appended to bench/results/quality.jsonl.
"""

from __future__ import annotations

import sys

from dustin_compile.cli import app

if __name__ == "__main__":
    app(["quality", *sys.argv[1:]], prog_name="python bench/quality.py")
