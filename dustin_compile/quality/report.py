"""Tables and plots of bench/results/quality.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from dustin_compile.benchmark.results import Row

Key = tuple[str, str, str, int | None, int | None]
MARKERS = "osv^DXP*<>d"
SETTINGS = ("sinks", "window", "gamma", "reduce", "heads")  # that the part "sensitivity" varies


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of rows of one name the last, which is the newest."""
    return list({row["name"]: row for row in rows}.values())


def index(rows: Iterable[Row]) -> dict[Key, Row]:
    """Rows of the main measurements by metric, selector, draft, context and budget."""
    names = ("metric", "selector", "draft", "context", "budget")
    return {tuple(row[name] for name in names): row for row in latest(rows)}


def make_table(rows: Sequence[Row], metric: str, draft: str) -> Table:
    """A metric by selector, context and budget, with its intervals."""
    columns, body = _cells(rows, metric, draft)
    table = Table("selector", title=f"{metric}, draft {draft}")
    for column in columns:
        table.add_column(column, justify="right")
    for line in body:
        table.add_row(*line)
    return table


def make_markdown(rows: Sequence[Row], metric: str, draft: str) -> str:
    """The same table for the README."""
    columns, body = _cells(rows, metric, draft)
    return _markdown(["selector", *columns], body)


def make_sensitivity_table(rows: Sequence[Row], draft: str) -> Table:
    """KL and ARR with one setting changed at a time, with intervals."""
    columns, body = _sensitivity_cells(rows, draft)
    table = Table(*columns, title=f"sensitivity, draft {draft}")
    for line in body:
        table.add_row(*line)
    return table


def make_sensitivity_markdown(rows: Sequence[Row], draft: str) -> str:
    """The same table for the README."""
    columns, body = _sensitivity_cells(rows, draft)
    return _markdown(columns, body)


def _sensitivity_cells(rows: Sequence[Row], draft: str) -> tuple[list[str], list[list[str]]]:
    body = []
    for name in SETTINGS:
        found = [row for row in latest(rows) if row["draft"] == draft and row["metric"] == f"kl_by_{name}"]
        for kl in found:
            arr = next(row for row in latest(rows) if row["name"] == kl["name"].replace("kl_by_", "arr_by_"))
            body.append([name, str(kl[name]), f"{kl['context']:,}, {kl['budget']}", _cell(kl), _cell(arr)])
    return ["setting", "value", "context, budget", "KL", "ARR"], body


def _markdown(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *body))


def _cell(row: Row) -> str:
    return f"{row['value']:.3f} ({row['low']:.3f}–{row['high']:.3f})"


def _cells(rows: Sequence[Row], metric: str, draft: str) -> tuple[list[str], list[list[str]]]:
    found = {key: row for key, row in index(rows).items() if key[0] == metric and key[2] == draft and key[3] and key[4]}
    places = sorted({(key[3], -(key[4] or 0)) for key in found})
    selectors = list(dict.fromkeys(key[1] for key in found))
    body = []
    for selector in selectors:
        line = [selector]
        for context, budget in places:
            row = found.get((metric, selector, draft, context, -budget))
            line.append("" if row is None else _cell(row))
        body.append(line)
    return [f"{context:,}, {-budget}" for context, budget in places], body


def draw_plots(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Loss and ARR against budget, ARR by layer, SnapKV's age and drift; the files that were written.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    rows, paths = latest(rows), []

    def draw(name: str, title: str, x: str, y: str, lines: dict[str, list[Row]], panel: str | None = None) -> None:
        """A figure with a line for each name, over the field x; a panel for each value of a field."""
        values = sorted({row[panel] for line in lines.values() for row in line}) if panel else [None]
        figure = Figure(figsize=(4.6 * len(values) + 1.6, 4.2), layout="constrained")
        for axes, value in zip(figure.subplots(1, len(values), squeeze=False, sharey=True)[0], values, strict=True):
            for marker, (label, line) in zip(MARKERS * 9, lines.items(), strict=False):
                line = sorted((row for row in line if panel is None or row[panel] == value), key=lambda row: row[x])
                axes.plot([r[x] for r in line], [r["value"] for r in line], marker=marker, markersize=4, label=label)
                axes.fill_between([r[x] for r in line], [r["low"] for r in line], [r["high"] for r in line], alpha=0.12)
            axes.set(title=f"{title}, {panel} {value:,}" if panel else title, xlabel=x.replace("_", " "))
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel(y)
        figure.axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=130)
        paths.append(path)

    def lines_of(metric: str, draft: str, label: str, *, skip: Sequence[str] = ()) -> dict[str, list[Row]]:
        lines: dict[str, list[Row]] = {}
        for row in rows:
            if (row["metric"], row["draft"]) == (metric, draft) and row["budget"] and row["selector"] not in skip:
                lines.setdefault(str(row[label]), []).append(row)
        return lines

    for draft in dict.fromkeys(row["draft"] for row in rows):
        if lines := lines_of("kl", draft, "selector", skip=["full"]):
            draw(f"quality-kl-{draft}", f"loss, {draft}", "budget", "KL(full ‖ sparse), nats", lines, "context")
        if lines := lines_of("arr", draft, "selector", skip=["full"]):
            draw(f"quality-arr-{draft}", f"recovery, {draft}", "budget", "attention recovery rate", lines, "context")
        if lines := lines_of("arr_of_layer", draft, "selector"):
            draw(f"quality-layers-{draft}", f"by layer, {draft}", "layer", "attention recovery rate", lines)
        if lines := lines_of("kl_at_age", draft, "selector"):
            draw(f"quality-age-{draft}", f"age of SnapKV's set, {draft}", "age", "KL, nats", lines, "budget")
        if lines := lines_of("kl_drift", draft, "refresh_every"):
            lines = {f"refresh_every {value}": line for value, line in lines.items()}
            draw(f"quality-drift-{draft}", f"drift, {draft}", "new_tokens", "KL(dense ‖ sparse), nats", lines)
    return paths
