"""The pictures of a report, drawn in memory: readable at the width of a phone."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Sheet

from evaluation.frontier import LARGEST_LEVEL
from evaluation.report_data import Figure, Replay, Speed
from evaluation.report_sections import Point, Section

_WIDTH_IN, _DPI = 5.2, 160
# Okabe and Ito's, told apart by most colour-blind eyes; the markers tell them apart in grey.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#4d4d4d")
_MARKERS = "osD^vP*X<>p"
_HATCHES = ("", "//", "..", "xx", "\\\\", "--")
_COST_CAPTIONS = {
    "KL": "KL of the output's law from the target's: as the ledger bounds it.",
    "regret": "Log probability given up where a token was rescued: a description, not a bound.",
}
_LONG_KEY = 8  # entries of a legend beyond which it is set smaller


@dataclass(frozen=True)
class Picture:
    """A picture of a page.

    Attributes:
        name: what it is about.
        png: the file.
        alt: what it shows, with its main figures.
        caption: how to read it.
        file_name: of its PNG, once it has a place.
    """

    name: str
    png: bytes
    alt: str
    caption: str
    file_name: str = ""


def section_pictures(section: Section) -> list[Picture]:
    """What there is to draw of a section's runs, the frontier first; nothing without runs."""
    if not section.points:
        return []
    drawn = [_frontier(section), _depths(section), _phases(section), _lengths(section)]
    drawn.append(_costs(section))
    return [picture for picture in drawn if picture is not None]


def speed_picture(speed: Speed) -> Picture | None:
    """Where the time of each arm goes; None where the phases were not measured."""
    phases = {name: arm.phases_ms for name, arm in speed.arms.items() if arm.phases_ms}
    if not phases:
        return None
    return Picture(
        name="speed-phases",
        png=_stacked(phases),
        alt=f"Milliseconds per token by phase. {_phases_text(phases)}",
        caption=f"Arms of {speed.folder}, measured side by side.",
    )


def replay_picture(replay: Replay) -> Picture | None:
    """The longest acceptance of each rule by its cost; None where no rule has a finite cost."""
    best: dict[str, list[tuple[float, float]]] = {}
    exact = replay.rows[0].acceptance_length
    for row in sorted(replay.rows[1:], key=lambda row: row.cost):
        line = best.setdefault(row.rule.partition(":")[0], [(0.0, exact)])
        if math.isfinite(row.cost) and row.acceptance_length > line[-1][1]:
            line.append((row.cost, row.acceptance_length))
    if not best:
        return None
    sheet, axes = _sheet(4.6)
    for place, (name, line) in enumerate(best.items()):
        costs, lengths = zip(*line, strict=True)
        colour, marker = _style(place)
        axes.plot(costs, lengths, color=colour, marker=marker, markersize=4, label=_plain(name))
    axes.axhline(exact, color="black", linestyle=":", label="exact")
    limit = 2.0 * min(max((level for level, _ in replay.frontier), default=1.0), LARGEST_LEVEL)
    axes.set(xlim=(0.0, limit or 1.0), xlabel=replay.cost_name, ylabel="acceptance length")
    _legend(sheet, axes)
    texts = [
        f"At most {level:g}: {row.rule}, {row.gain.value:+.1%}" for level, row in replay.frontier
    ]
    return Picture(
        name="replay",
        png=_png(sheet),
        alt=f"Acceptance length by cost; exact has {exact:.2f}. {'. '.join(texts)}.",
        caption="The best that each rule reaches up to a cost, over its knobs and divergences.",
    )


def _frontier(section: Section) -> Picture | None:
    shown = [point for point in section.points[1:] if point.ratios.speed_up is not None]
    if not shown:
        return None
    sheet, axes = _sheet(4.8)
    exact = section.quality(section.points[0])
    axes.errorbar(
        [1.0],
        [exact.value],
        yerr=_ends([exact]),
        color="black",
        marker="*",
        markersize=12,
        linestyle="none",
        label=_plain(section.points[0].label),
    )
    for place, (name, points) in enumerate(section.lines().items()):
        _line(axes, section, name, [point for point in points if point in shown], _style(place))
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.margins(x=0.15)  # room for what is written beside the points
    axes.set(xlabel="speed-up per token over exact", ylabel=section.quality_name)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _legend(sheet, axes)
    texts = [
        f"{point.label}: {point.ratios.speed_up.value:.2f}x at {section.quality(point).value:.1%}"
        for point in shown
        if point.ratios.speed_up is not None
    ]
    return Picture(
        name="frontier",
        png=_png(sheet),
        alt=f"{section.quality_name.capitalize()} against speed-up per token. "
        f"Exact: {exact.value:.1%}. {'. '.join(texts)}.",
        caption="Up and to the right is better. Bars are 95% intervals; lines join the settings of "
        "one rule in the order of its knob, a dashed one is exact with a truncated law. Hollow "
        "points were timed in separate runs.",
    )


def _line(
    axes: Any, section: Section, name: str, points: Sequence[Point], style: tuple[str, str]
) -> None:
    """A rule's points with both intervals."""
    if not points:
        return
    colour, marker = style
    speeds = [point.ratios.speed_up for point in points if point.ratios.speed_up is not None]
    qualities = [section.quality(point) for point in points]
    x, y = [each.value for each in speeds], [each.value for each in qualities]
    axes.errorbar(
        x,
        y,
        xerr=_ends(speeds),
        yerr=_ends(qualities),
        color=colour,
        marker=marker,
        markersize=6,
        linestyle="--" if points[0].is_control else "-",
        elinewidth=0.8,
        label=_plain(name),
    )
    apart = [place for place, point in enumerate(points) if point.ratios.source is None]
    axes.plot(
        [x[place] for place in apart],
        [y[place] for place in apart],
        marker=marker,
        markersize=6,
        markeredgecolor=colour,
        markerfacecolor="white",
        linestyle="none",
        zorder=4,
    )
    for point, at in zip(points, zip(x, y, strict=True), strict=True):
        knob = _knob(point)
        if knob:
            axes.annotate(_plain(knob), at, xytext=(4, 4), textcoords="offset points", fontsize=8)


def _knob(point: Point) -> str:
    """What tells a point from the others of its line."""
    if point.is_control:
        return point.label.partition(" ")[2]
    knob = point.run.rule.partition(":")[2].partition(":")[0]
    budget = point.run.record["settings"].get("budget")
    return knob if budget is None else f"{knob}, {budget}"


def _depths(section: Section) -> Picture | None:
    shown = [point for point in section.points if point.depth_rates]
    if not shown:
        return None
    sheet, axes = _sheet(4.8)
    deepest = max(len(point.depth_rates) for point in shown)
    for place, point in enumerate(shown):
        colour, marker = _style(place)
        axes.plot(
            range(1, len(point.depth_rates) + 1),
            point.depth_rates,
            color="black" if point is section.points[0] else colour,
            marker=marker,
            markersize=5,
            label=_plain(point.label),
        )
    axes.set(xlabel="depth in the draft tree", ylabel="acceptance rate", ylim=(0.0, 1.02))
    axes.set_xticks(range(1, deepest + 1))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _legend(sheet, axes)
    texts = [
        f"{point.label}: {', '.join(f'{rate:.0%}' for rate in point.depth_rates)}"
        for point in shown
    ]
    return Picture(
        name="acceptance",
        png=_png(sheet),
        alt=f"Acceptance rate by depth from 1. {'. '.join(texts)}.",
        caption="Accepted or rescued among the cycles that got as far as that depth.",
    )


def _phases(section: Section) -> Picture | None:
    phases = {point.label: point.phases_ms for point in section.points if point.phases_ms}
    if not phases:
        return None
    return Picture(
        name="phases",
        png=_stacked(phases),
        alt=f"Milliseconds per token by phase. {_phases_text(phases)}",
        caption="Each run's own clock; times of different runs also differ by what else the "
        "machine did.",
    )


def _phases_text(phases: Mapping[str, Mapping[str, float]]) -> str:
    """The sum of each bar and its two largest parts."""
    texts = []
    for label, parts in phases.items():
        largest = sorted(parts, key=lambda name: parts[name], reverse=True)[:2]
        shares = " and ".join(f"{name} {parts[name]:.1f}" for name in largest)
        texts.append(f"{label}: {sum(parts.values()):.1f} ms, most of it {shares}")
    return f"{'. '.join(texts)}."


def _stacked(bars: Mapping[str, Mapping[str, float]]) -> bytes:
    """Horizontal bars, their parts by colour and hatch."""
    sheet, axes = _sheet(1.8 + 0.42 * len(bars))
    left = [0.0] * len(bars)
    for place, phase in enumerate(next(iter(bars.values()))):
        widths = [max(0.0, parts[phase]) for parts in bars.values()]
        axes.barh(
            range(len(bars)),
            widths,
            left=left,
            color=_COLOURS[place % len(_COLOURS)],
            hatch=_HATCHES[place % len(_HATCHES)],
            edgecolor="white",
            linewidth=0.0,
            label=phase,
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    _rows(axes, list(bars))
    axes.set_xlabel("milliseconds per token")
    _legend(sheet, axes, num_columns=3)
    return _png(sheet)


def _lengths(section: Section) -> Picture | None:
    shown = {
        point.label: point.ratios.length
        for point in section.points[1:]
        if point.ratios.length is not None
    }
    if not shown:
        return None
    sheet, axes = _sheet(1.2 + 0.42 * len(shown))
    figures = list(shown.values())
    axes.errorbar(
        [figure.value for figure in figures],
        range(len(figures)),
        xerr=_ends(figures),
        color=_COLOURS[0],
        marker="o",
        linestyle="none",
    )
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    _rows(axes, list(shown))
    axes.set_xlabel("tokens of the answer / exact's")
    texts = [
        f"{label}: {figure.value:.3f} ({figure.low:.3f} to {figure.high:.3f})"
        for label, figure in shown.items()
    ]
    return Picture(
        name="lengths",
        png=_png(sheet),
        alt=f"Length ratios to exact, medians over questions. {'. '.join(texts)}.",
        caption="Medians over questions with 95% intervals. Shorter answers take less time without "
        "being made faster, so speed-ups here are per token.",
    )


def _costs(section: Section) -> Picture | None:
    shown = {
        point.label: point.cost
        for point in section.points
        if point.cost is not None and math.isfinite(point.cost)
    }
    if not shown:
        return None
    name = cost_name(section)
    sheet, axes = _sheet(1.2 + 0.42 * len(shown))
    axes.barh(range(len(shown)), list(shown.values()), color=_COLOURS[0], height=0.6)
    _rows(axes, list(shown))
    axes.set_xlabel(f"{name} per token (nats)")
    axes.set_xlim(left=0.0)
    texts = [f"{label}: {cost:.4f}" for label, cost in shown.items()]
    return Picture(
        name="costs",
        png=_png(sheet),
        alt=f"Nats of {name} per token. {'. '.join(texts)}.",
        caption=_COST_CAPTIONS[name],
    )


def cost_name(section: Section) -> str:
    """Which ledger the runs of a section keep: KL when sampling, regret at temperature 0."""
    has_kl = any(point.scores["kl_per_token"] is not None for point in section.points)
    return "KL" if has_kl else "regret"


def _sheet(height_in: float) -> tuple[Sheet, Any]:
    sheet = Sheet(figsize=(_WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(sheet)
    axes: Any = sheet.add_subplot()
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    return sheet, axes


def _rows(axes: Any, labels: Sequence[str]) -> None:
    """Names the rows of horizontal bars, the first on top."""
    axes.set_yticks(range(len(labels)), [_plain(label) for label in labels], fontsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def _legend(sheet: Sheet, axes: Any, num_columns: int = 2) -> None:
    handles, labels = axes.get_legend_handles_labels()
    sheet.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=num_columns,
        frameon=False,
        fontsize=9 if len(labels) <= _LONG_KEY else 7,
    )


def _png(sheet: Sheet) -> bytes:
    stream = io.BytesIO()
    # No date and no version: the same figures give the same file.
    sheet.savefig(stream, format="png", dpi=_DPI, metadata={"Software": None})
    return stream.getvalue()


def _ends(figures: Sequence[Figure]) -> list[list[float]]:
    """Lengths of the error bars below and above."""
    return [
        [max(0.0, each.value - each.low) for each in figures],
        [max(0.0, each.high - each.value) for each in figures],
    ]


def _style(place: int) -> tuple[str, str]:
    """Colour and marker: 88 pairs before one comes again."""
    return _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]


def _plain(text: str) -> str:
    """Text that is drawn as it is: no formulas, and not hidden from the legend."""
    escaped = text.replace("\\", "\\\\").replace("$", r"\$") if "$" in text else text
    return f" {escaped}" if escaped.startswith("_") else escaped
