"""Rows of bench/results/*.jsonl: one measurement each, with what it was measured on."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"  # in the checkout only, not in the wheel
RESULTS = BENCH / "results" if BENCH.is_dir() else Path()

Row = dict[str, Any]


def make_row(name: str, value: float, unit: str, device: torch.device, conditions: str, **fields: Any) -> Row:
    """One measurement.

    Args:
        name: what was measured, on which shape, at `{context}x{batch}`.
        value: rounded to four significant digits.
        unit: of the value.
        device: where it was measured.
        conditions: how, for people.
        fields: the same for programs.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else f"none ({platform.processor() or 'CPU'})"
    versions = {package: _version(package) for package in ("torch", "transformers")}
    if device.type == "cuda":
        versions["triton"] = _version("triton")
    return {
        "name": name,
        "value": float(f"{value:.4g}"),
        "unit": unit,
        "gpu": gpu,
        "commit": _commit(),
        "versions": {**versions, "python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "conditions": conditions,
        **fields,
    }


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a file, which is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


_version = functools.cache(version)  # reads the installed metadata


@functools.cache
def _commit() -> str:
    """The checkout's commit; `$DUSTIN_COMMIT` where the code runs without its repository."""
    if "DUSTIN_COMMIT" in os.environ:
        return os.environ["DUSTIN_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
