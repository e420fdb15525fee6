"""Tables and plots of bench/results/quality.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from dustin_compile.benchmark.results import Row

MARKERS = "osv^DXP*<>dph"
SETTINGS = ("sinks", "window", "gamma", "reduce", "heads")  # that the part "sensitivity" varies


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of rows of one name the last, which is the newest."""
    return list({row["name"]: row for row in rows}.values())


def make_table(rows: Sequence[Row], metric: str, draft: str) -> Table:
    """A metric by selector, context and budget, with its intervals."""
    found = {
        (row["selector"], row["context"], row["budget"]): _cell(row)
        for row in latest(rows)
        if (row["metric"], row["draft"]) == (metric, draft) and row["context"] and row["budget"]
    }
    places = sorted({key[1:] for key in found}, key=lambda place: (place[0], -place[1]))
    table = Table("selector", title=Text(f"{metric}, draft {draft}"))
    for context, budget in places:
        table.add_column(f"{context:,}, {budget}", justify="right")
    for selector in dict.fromkeys(selector for selector, *_ in found):
        table.add_row(selector, *(found.get((selector, *place), "") for place in places))
    return table


def make_sensitivity_table(rows: Sequence[Row], draft: str) -> Table:
    """KL and ARR with one setting changed at a time, with intervals."""
    table = Table("setting", "value", "context, budget", "KL", "ARR", title=Text(f"sensitivity, draft {draft}"))
    rows = [row for row in latest(rows) if row["draft"] == draft]
    for name in SETTINGS:
        for kl in (row for row in rows if row["metric"] == f"kl_by_{name}"):
            arr = next(row for row in rows if row["name"] == kl["name"].replace("kl_by_", "arr_by_"))
            table.add_row(name, str(kl[name]), f"{kl['context']:,}, {kl['budget']}", _cell(kl), _cell(arr))
    return table


def _cell(row: Row) -> str:
    return f"{row['value']:.3f} ({row['low']:.3f}–{row['high']:.3f})"


def draw_plots(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Loss and ARR against budget, ARR by layer, SnapKV's age and drift; the files that were written.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    rows, paths, colors = latest(rows), [], colormaps["tab20"]

    def draw(name: str, title: str, x: str, y: str, lines: dict[str, list[Row]], panel: str | None = None) -> None:
        """A figure with a line for each name, over the field x; a panel for each value of a field."""
        values = sorted({row[panel] for line in lines.values() for row in line}) if panel else [None]
        figure = Figure(figsize=(4.6 * len(values) + 1.6, 4.2), layout="constrained")
        for axes, value in zip(figure.subplots(1, len(values), squeeze=False, sharey=True)[0], values, strict=True):
            for number, (label, line) in enumerate(lines.items()):
                line = sorted((row for row in line if panel is None or row[panel] == value), key=lambda row: row[x])
                places = [row[x] for row in line]
                color = colors(2 * number % 20 + number // 10 % 2)  # the dark ones first
                marker = MARKERS[number % len(MARKERS)]
                axes.plot(places, [r["value"] for r in line], marker=marker, markersize=4, color=color, label=label)
                low, high = ([row[end] for row in line] for end in ("low", "high"))
                axes.fill_between(places, low, high, alpha=0.12, color=color)
            axes.set(title=f"{title}, {panel} {value:,}" if panel else title, xlabel=x.replace("_", " "))
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel(y)
        figure.axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=130)
        paths.append(path)

    def lines_of(draft: str, metric: str, label: str, **fields) -> dict[str, list[Row]]:
        """Rows of a metric by the field that names their line."""
        lines: dict[str, list[Row]] = {}
        fields |= {"draft": draft, "metric": metric}
        for row in rows:
            same = all(row[name] == value for name, value in fields.items())
            if same and row["budget"] and row["selector"] != "full":
                lines.setdefault(str(row[label]), []).append(row)
        return lines

    for draft in dict.fromkeys(row["draft"] for row in rows):
        name = draft.strip("/").replace("/", "-")
        if lines := lines_of(draft, "kl", "selector"):
            draw(f"quality-kl-{name}", f"loss, {draft}", "budget", "KL(full ‖ sparse), nats", lines, "context")
        if lines := lines_of(draft, "arr", "selector"):
            draw(f"quality-arr-{name}", f"recovery, {draft}", "budget", "attention recovery rate", lines, "context")
        for context, budget in dict.fromkeys((row["context"], row["budget"]) for row in rows if row["context"]):
            at = {"context": context, "budget": budget}
            where, title = f"{name}-{context}-{budget}", f"{draft}, {context:,}, budget {budget}"
            if lines := lines_of(draft, "arr_of_layer", "selector", **at):
                draw(f"quality-layers-{where}", title, "layer", "attention recovery rate", lines)
            if lines := lines_of(draft, "kl_at_age", "selector", **at):
                draw(f"quality-age-{where}", title, "age", "KL, nats", lines)
            if lines := lines_of(draft, "kl_drift", "refresh_every", **at):
                lines = {f"refresh_every {value}": line for value, line in lines.items()}
                draw(f"quality-drift-{where}", title, "new_tokens", "KL(dense ‖ sparse), nats", lines)
    return paths
