"""The picture of a replay: what each rule gains, against each of its costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.calibrate import Calibration, family
from eagle_fsd.files import whole_file
from eagle_fsd.recorder import Expectation

# Below this an axis is linear, so that it can show 0; above, it is logarithmic.
LINEAR_BELOW = 0.01
# In nats per token, beyond any finite cost; an axis cannot show the largest numbers there are.
LARGEST_LEVEL = 1e6

_MARKERS = "osD^vP*X<>ph"
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f3c8d"),
    *("#4d4d4d", "#b2a000", "#1b9e77", "#e7298a"),
)

Figure = Callable[[Expectation], float]


def lines(calibration: Calibration) -> dict[str, list[Expectation]]:
    """The points of each line by its name, a rule with its divergence, in the order of the rows."""
    found: dict[str, list[Expectation]] = {}
    for row in calibration.rows:
        found.setdefault(family(row.rule), []).append(row.expectation)
    return found


def best_lines(calibration: Calibration, levels: Sequence[float]) -> dict[str, str]:
    """The best line of each rule, by the rule's name.

    The best of a rule's lines (its divergences, or its forms) has the greatest acceptance length
    summed over the cost levels, exact's where none of its points is cheap enough.
    """
    best: dict[str, tuple[float, str]] = {}
    for name, points in lines(calibration).items():
        score = sum(
            max(
                calibration.exact.acceptance_length,
                *(
                    point.acceptance_length if point.cost_per_token <= level else 0.0
                    for point in points
                ),
            )
            for level in levels
        )
        rule = name.partition(":")[0]
        if rule not in best or score > best[rule][0]:
            best[rule] = (score, name)
    return {rule: name for rule, (_, name) in best.items()}


def draw(calibration: Calibration, levels: Sequence[float], path: Path) -> None:
    """Draws acceptance length against cost, moved mass and doubled mass, each per token.

    Every rule has a colour and a marker. Of a rule that comes with several divergences the best is
    drawn so, see `best_lines`, and the others thin and pale in its colour. The panel of costs ends
    at twice the largest level; the others show everything.

    Args:
        calibration: the totals of all rules.
        levels: costs per token, which choose the best divergence.
        path: a PNG, written whole or not at all.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet(figsize=(13, 7.5), layout="constrained")
    FigureCanvasAgg(sheet)
    panels = sheet.subplot_mosaic([["cost", "poor"], ["cost", "doubled"]], width_ratios=[1.6, 1.0])
    shown: list[tuple[Any, str, Figure]] = [
        (
            panels["cost"],
            f"{calibration.cost_name} per token (nats)",
            lambda point: point.cost_per_token,
        ),
        (
            panels["poor"],
            "mass moved to tokens under a fifth of the best, per token",
            lambda point: point.poor_mass / point.num_tokens,
        ),
        (
            panels["doubled"],
            "mass above twice the target's, per token",
            lambda point: point.doubled_mass / point.num_tokens,
        ),
    ]
    best = best_lines(calibration, levels)
    for axes, label, figure in shown:
        _draw_panel(axes, calibration, best, figure)
        axes.set(xlabel=label, ylabel="acceptance length")
    _zoom(panels["cost"], calibration, 2.0 * max(levels))
    sheet.suptitle(
        f"All rules on the trees of one exact run, {calibration.num_prompts} questions, "
        f"temperature {calibration.settings.get('temperature', '?')}"
    )
    handles, labels = panels["cost"].get_legend_handles_labels()
    sheet.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    with whole_file(path) as temporary:
        sheet.savefig(temporary, format="png", dpi=130)


def _draw_panel(axes: Any, calibration: Calibration, best: dict[str, str], figure: Figure) -> None:
    colours = {rule: _COLOURS[index % len(_COLOURS)] for index, rule in enumerate(best)}
    markers = {rule: _MARKERS[index % len(_MARKERS)] for index, rule in enumerate(best)}
    is_first_pale = True
    for name, points in lines(calibration).items():
        rule = name.partition(":")[0]
        x, y = _curve(points, figure)
        if best[rule] == name:
            axes.plot(x, y, color=colours[rule], marker=markers[rule], markersize=5, label=name)
        else:
            label = "other divergences or forms (pale)" if is_first_pale else None
            axes.plot(x, y, color=colours[rule], linewidth=0.8, alpha=0.35, label=label)
            is_first_pale = False
    exact = calibration.exact.acceptance_length
    axes.axhline(exact, color="black", linestyle=":", label="exact")
    axes.set_xscale("symlog", linthresh=LINEAR_BELOW, linscale=0.5)
    axes.set_xlim(left=0.0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.25)


def _zoom(axes: Any, calibration: Calibration, max_cost: float) -> None:
    """Shows costs up to a limit, and the acceptance lengths that they buy."""
    right = max(max_cost, 10.0 * LINEAR_BELOW)
    points = [calibration.exact, *(row.expectation for row in calibration.rows)]
    lengths = [point.acceptance_length for point in points if point.cost_per_token <= right]
    margin = 0.05 * (max(lengths) - min(lengths)) or 0.05
    axes.set(xlim=(0.0, right), ylim=(min(lengths) - margin, max(lengths) + margin))


def _curve(points: Iterable[Expectation], figure: Figure) -> tuple[list[float], list[float]]:
    """The finite points of a line from the cheapest on."""
    pairs = sorted((figure(point), point.acceptance_length) for point in points)
    finite = [(x, y) for x, y in pairs if math.isfinite(x)]
    return [x for x, _ in finite], [y for _, y in finite]
