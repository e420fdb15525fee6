"""What a person sees of the measurements: a table, and two plots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.table import Table

from dustin_compile.benchmark.engines import ENGINES
from dustin_compile.benchmark.results import Row

PARTS = ("draft", "score", "select", "verify", "accept")


def make_table(rows: Iterable[Row], title: str) -> Table:
    """Engines at each point: time of a step, tokens a step and a second, and how it compares with vanilla."""
    points: dict[tuple[int, int], dict[tuple[str, str], Row]] = {}
    for row in rows:
        metric = row["name"].split("/")[0]
        points.setdefault((row["context"], row["batch"]), {})[metric, row["engine"]] = row
    table = Table(title=title)
    for heading in ("context", "engine", "ms/step", "tokens/step", "tokens/s", "speed-up", "best γ"):
        table.add_column(heading, justify="left" if heading == "engine" else "right", no_wrap=heading == "engine")
    for (context, batch), found in sorted(points.items(), key=lambda item: (item[0][1], item[0][0])):
        vanilla = found.get(("tokens_per_second", "vanilla"))
        table.add_section()
        for engine in ENGINES:
            rate, step = found.get(("tokens_per_second", engine)), found.get(("step_us", engine))
            best = found.get(("tokens_per_second_best_gamma", engine))
            if rate is None:
                continue
            table.add_row(
                f"{context:,} × {batch}",
                engine,
                f"{step['value'] / 1e3:.2f}" if step else "",
                f"{rate.get('tokens_per_step', 1):.2f}",
                f"{rate['value']:,.0f}",
                f"{rate['value'] / vanilla['value']:.2f}×" if vanilla else "",
                f"{best['gamma']}: {best['value']:,.0f}" if best else "",
            )
    return table


def draw_plots(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Tokens per second against context, a line for each engine, and step time by part; a file a pair and batch.

    Of several measurements of one thing the last counts. GPUs and acceptances have files of their own: the plain name
    is that of the first GPU in the rows, and of the acceptance that it was last measured with.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    for (pair, batch, gpu, acceptance, tag), group in _groups(rows):
        stem = f"{pair}-{batch}{tag}"
        note = "" if acceptance is None else f", acceptance {acceptance:g} (synthetic)"

        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for engine in ENGINES:
            line = [row for row in group if row["name"].startswith(f"tokens_per_second/{engine}/")]
            if line:
                axes.plot(
                    [row["context"] for row in line],
                    [row["value"] for row in line],
                    marker="o",
                    label=engine,
                    color=f"C{ENGINES.index(engine)}",
                )
        axes.set(
            xscale="log", yscale="log", xlabel="context, tokens", ylabel="tokens/s", title=f"{pair} × {batch}{note}"
        )
        contexts = sorted({row["context"] for row in group})
        axes.set_xticks(contexts, [f"{context // 1024}k" if context >= 1024 else str(context) for context in contexts])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        figure.legend(title=gpu, loc="outside right upper")
        paths.append(folder / f"tokens_per_second-{stem}.png")
        figure.savefig(paths[-1], dpi=150)
        plt.close(figure)

        parts = {
            part: {row["context"]: row["value"] for row in group if row["name"].startswith(f"step_part_us/{part}/")}
            for part in PARTS
        }
        measured = [context for context in contexts if all(context in values for values in parts.values())]
        if not measured:
            continue
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        bottom = [0.0] * len(measured)
        for part, values in parts.items():
            heights = [values[context] / 1e3 for context in measured]
            axes.bar([f"{context:,}" for context in measured], heights, bottom=bottom, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.set(xlabel="context, tokens", ylabel="ms", title=f"dustin+ step by part, {pair} × {batch}")
        figure.legend(title=gpu, loc="outside right upper", reverse=True)
        paths.append(folder / f"step_by_part-{stem}.png")
        figure.savefig(paths[-1], dpi=150)
        plt.close(figure)
    return paths


def _groups(rows: Iterable[Row]) -> Iterator[tuple[tuple[str, int, str, float | None, str], list[Row]]]:
    """(pair, batch, gpu, acceptance, tag of the file's name), and the last row of each name there, by context.

    Rows without an acceptance, of engines that need none, are in the groups of all acceptances.
    """
    points: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for row in rows:
        if "context" in row:
            points.setdefault((row["pair"], row["batch"]), {}).setdefault(row["gpu"], []).append(row)
    for (pair, batch), gpus in sorted(points.items()):
        for gpu, found in gpus.items():
            drawn = [row["acceptance"] for row in found if row["synthetic"]]
            for acceptance in sorted(set(drawn)) or [None]:
                latest = {row["name"]: row for row in found if not row["synthetic"] or row["acceptance"] == acceptance}
                tags = [] if gpu == next(iter(gpus)) else [re.sub(r"\W+", "-", gpu.lower()).strip("-")]
                if drawn and acceptance != drawn[-1]:
                    tags.append(f"acceptance-{acceptance:g}")
                group = sorted(latest.values(), key=lambda row: row["context"])
                yield (pair, batch, gpu, acceptance, "".join(f"-{tag}" for tag in tags)), group
