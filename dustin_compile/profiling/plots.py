"""Figures of a profile's search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from dustin_compile.profiling.search import HeadSet, SearchResult


def plot_search(directory: Path, head_scores: dict[str, Tensor], result: SearchResult) -> None:
    """Write the figures as PNG files.

    Args:
        directory: made where it is missing.
        head_scores: [layers, heads] of "target" and "draft".
        result: of the search.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for role, scores in head_scores.items():
        with _figure(directory / f"{role}_heads.png", "query head", "layer", f"Retrieval head scores, {role}") as axes:
            image = axes.imshow(scores.numpy(), aspect="auto", cmap="viridis")
            axes.figure.colorbar(image, label="attention mass on the answer")

    with _figure(directory / "target_layer.png", "target layer", "ARR", "Retrieval heads of one target layer") as axes:
        best = max(range(len(result.layer_arr)), key=lambda layer: result.layer_arr[layer])
        axes.bar(range(len(result.layer_arr)), result.layer_arr, color="tab:gray")
        axes.bar(best, result.layer_arr[best], color="tab:orange", label=f"best: {best}")
        low = min(result.layer_arr)
        axes.set_ylim(low - 0.1 * (max(result.layer_arr) - low) - 1e-3)

    with _figure(directory / "draft_layers.png", "draft layers", "ARR", "Draft layers added at an even split") as axes:
        axes.plot(range(len(result.draft_arr)), result.draft_arr, marker="o")
        axes.set_xticks(range(len(result.draft_arr)))

    with _figure(directory / "draft_share.png", "m (positions from the draft's ranking)", "ARR", "Split") as axes:
        axes.plot(*zip(*result.share_arr, strict=True), marker=".")
        axes.plot(result.chosen.draft_share, result.chosen.arr, "o", color="tab:orange", label="chosen")

    title = "Recovery against the cost of scoring"
    with _figure(directory / "frontier.png", "keys read for scoring, % of the target's K and V", "ARR", title) as axes:
        costs = [100 * found.cost for found in result.frontier]
        axes.plot(costs, [found.arr for found in result.frontier], marker="o", label="KV heads, greedily")
        axes.plot(100 * result.paper.cost, result.paper.arr, "s", label="one target layer (paper)")
        axes.plot(100 * result.chosen.cost, result.chosen.arr, "*", markersize=14, label="chosen")
        axes.axhline(result.oracle, linestyle="--", color="black", label="oracle, one set for all layers")
        for found in result.frontier:
            axes.annotate(_count(found), (100 * found.cost, found.arr), textcoords="offset points", xytext=(4, -10))


def _count(found: HeadSet) -> str:
    return f"{len(found.target)}+{len(found.draft)}"


@contextmanager
def _figure(path: Path, x: str, y: str, title: str) -> Iterator[Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y, title=title)
    yield axes
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=120)
