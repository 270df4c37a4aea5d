"""The page of a report: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from evaluation.charts import Picture, cost_name
from evaluation.report_data import Figure, Replay, Speed
from evaluation.report_sections import TRUNCATION, Point, Section

_NONE = "-"
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de;
  --back: #ffffff; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9da7b1; --line: #3d444d;
  --back: #0d1117; --card: #161b22; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--back); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.25; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
figure { margin: 1rem 0; }
img { display: block; width: 100%; max-width: 44rem; height: auto; background: #fff;
  border: 1px solid var(--line); border-radius: 6px; }
figcaption, .soft { color: var(--soft); font-size: .9rem; max-width: 44rem; }
.note { background: var(--card); border-left: 4px solid #d55e00; padding: .5rem .8rem;
  margin: .6rem 0; }
.scroll { overflow-x: auto; width: fit-content; max-width: 100%;
  border: 1px solid var(--line); border-radius: 6px; }
.scroll:focus-visible { outline: 2px solid #0072b2; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
th, td { padding: .35rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
thead th { background: var(--card); vertical-align: bottom; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card);
  max-width: 11rem; white-space: normal; }
"""


@dataclass(frozen=True)
class Illustrated:
    """A section with its pictures.

    Attributes:
        section: the figures.
        pictures: of its runs.
        speeds: pictures of its speed folders, in their order; None where there is nothing to draw.
        replays: the same of its replay folders.
    """

    section: Section
    pictures: Sequence[Picture]
    speeds: Sequence[Picture | None]
    replays: Sequence[Picture | None]

    def all_pictures(self) -> list[Picture]:
        """All there are."""
        found = (*self.pictures, *self.speeds, *self.replays)
        return [picture for picture in found if picture is not None]


def page(parts: Sequence[Illustrated]) -> str:
    """The whole page. Whatever comes from runs is escaped."""
    body = "\n".join(_section(part) for part in parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Evaluation report</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>Evaluation report</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(part: Illustrated) -> str:
    section = part.section
    blocks = [f"<h2>{escape(section.task)}, temperature {section.temperature:g}</h2>"]
    if section.points:
        blocks += _runs(section, {picture.name: picture for picture in part.pictures})
    for speed, picture in zip(section.speeds, part.speeds, strict=True):
        blocks += _speed(speed, picture)
    for replay, picture in zip(section.replays, part.replays, strict=True):
        blocks += _replay(replay, picture)
    return "\n".join(blocks)


def _runs(section: Section, pictures: Mapping[str, Picture]) -> list[str]:
    exact = section.points[0]
    blocks = [
        _text(
            f"Runs: {len(section.points)}, questions answered: {len(exact.run.answers)}, compared "
            f"with: {exact.label} ({exact.run.folder})."
        )
    ]
    blocks += [f'<p class="note">{escape(_sentence(note))}</p>' for note in section.notes]
    blocks += ["<h3>Quality and speed</h3>", *_shown(pictures, "frontier"), *_method(section)]
    blocks += ["<h3>All runs</h3>", _run_table(section)]
    blocks += ["<h3>Truncated sampling as a control</h3>", *_control(section)]
    blocks += ["<h3>Acceptance by depth</h3>", *_shown(pictures, "acceptance"), _depths(section)]
    blocks += ["<h3>Where time goes</h3>", *_shown(pictures, "phases")]
    if "phases" not in pictures:
        blocks.append(
            _text(
                "These runs were not made on a CPU: an accelerator goes on working while a phase's "
                "clock is read. evaluation.speed waits for it and has the phases."
            )
        )
    blocks += ["<h3>Length ratios</h3>", *_shown(pictures, "lengths")]
    if "lengths" not in pictures:
        blocks.append(_text("There is no run beside the exact one."))
    name = cost_name(section)
    blocks += [f"<h3>{name[:1].upper()}{name[1:]} per token</h3>"]
    blocks += _shown(pictures, "costs")
    if "costs" not in pictures:
        blocks.append(_text("No run has a finite cost: exact and plain decoding keep no ledger."))
    blocks += ["<h3>What was run</h3>", _provenance(section)]
    return blocks


def _method(section: Section) -> list[str]:
    """What the two axes are, and how far they are to be believed."""
    blocks = [
        _text(
            "Speed-up per token (length-adjusted) = exact's seconds for a question / this run's x "
            "this run's tokens / exact's. The ratio of wall times in the table leaves the second "
            "factor out and rewards short answers. Ratios are medians over questions with "
            "bootstrap intervals."
        )
    ]
    if section.is_scored:
        blocks.append(_text("Accuracy is the share of right answers with its Wilson interval."))
    else:
        blocks.append(
            _text(
                "Agreement is the share of an answer before its first token that differs from "
                "exact's, a mean over questions with a bootstrap interval. It says what changed, "
                "not what got worse."
            )
        )
    sources = dict.fromkeys(p.ratios.source for p in section.points[1:] if p.ratios.source)
    if sources:
        folders = ", ".join(map(str, sources))
        blocks.append(
            _text(
                f'Speed-ups marked "side by side" are the paired ones of {folders}: both ways '
                "answered each question (its first turn) in turns in one process."
            )
        )
    if any(point.ratios.source is None for point in section.points[1:]):
        blocks.append(
            '<p class="note">Speed-ups marked "separate runs" divide times of different runs. '
            "Whatever else the machine did then is in them and not in their intervals; on a noisy "
            "machine they are not comparable. evaluation.speed measures side by side.</p>"
        )
    return blocks


_RUN_HEADS = (
    "run",
    "answers",
    "right",
    "equal turns",
    "common prefix",
    "speed-up per token",
    "wall-time ratio",
    "timed",
    "length, median",
    "length, of sums",
    "tokens / cycle",
    "nats / token",
    "repeated",
    "cut off",
    "tokens / s",
)


def _run_table(section: Section) -> str:
    rows = []
    for point in section.points:
        scores, ratios = point.scores, point.ratios
        against = {} if point is section.points[0] else scores["against_exact"] or {}
        is_exact = point is section.points[0]
        source = "side by side" if ratios.source else "separate runs"
        rows.append(
            [
                point.label,
                f"{scores['num_answers']}/{scores['num_questions']}",
                _percent(point.accuracy),
                _share(against.get("agreement", {}).get("equal")),
                _NONE if is_exact else _percent(point.prefix),
                _NONE if is_exact else _ratio(ratios.speed_up),
                _NONE if is_exact else _ratio(ratios.wall_time),
                _NONE if is_exact else source,
                _NONE if is_exact else _ratio(ratios.length, ""),
                _number(against.get("length_ratio", {}).get("of_sums"), 3),
                _number(scores["acceptance_length"]["micro"], 2),
                _number(point.cost, 4),
                _share(scores["repetition_rate"]),
                _share(scores["cut_share"]),
                _number(scores["tokens_per_second"], 1),
            ]
        )
    return _table("all runs", _RUN_HEADS, rows)


def _control(section: Section) -> list[str]:
    """Relaxed runs against exact sampling from a truncated law at the same speed."""
    controls = [point for point in section.points if point.is_control]
    if not controls:
        return [
            _text(
                "No control among these folders. An exact run with --min-p (or --top-p, --top-k) "
                "also gets faster by leaving unlikely tokens out, and needs no relaxed rule: add "
                "some, and their line is drawn dashed."
            )
        ]
    texts = [
        _text(
            "Exact decoding of a truncated law (dashed) also gets faster by leaving unlikely "
            "tokens out. A relaxed rule earns its cost where it is better than the control at the "
            "same speed; the control's quality there is read between its points."
        )
    ]
    known = [
        (point.ratios.speed_up.value, section.quality(point).value)
        for point in (section.points[0], *controls)
        if point.ratios.speed_up is not None
    ]
    speeds, qualities = zip(*sorted(known), strict=True) if known else ((), ())
    rows = []
    for point in section.points[1:]:
        speed = point.ratios.speed_up
        if point.is_control or speed is None or not speeds:
            continue
        quality = section.quality(point).value
        if speeds[0] <= speed.value <= speeds[-1]:
            control = float(np.interp(speed.value, speeds, qualities))
            cells = [_share(control), f"{100 * (quality - control):+.1f} points"]
        else:
            side = "faster" if speed.value > speeds[-1] else "slower"
            cells = [_NONE, f"{side} than every control"]
        rows.append([point.label, f"{speed.value:.2f}x", _share(quality), *cells])
    if not rows:
        return [*texts, _text("There is no relaxed run to compare with it.")]
    heads = ("run", "speed-up per token", section.quality_name, "control there", "difference")
    return [*texts, _table("relaxed runs against the control", heads, rows)]


def _depths(section: Section) -> str:
    deepest = max((len(point.depth_rates) for point in section.points), default=0)
    if not deepest:
        return _text("No run drafted anything.")
    heads = ["run", *(f"depth {depth}" for depth in range(1, deepest + 1))]
    rows = [
        [point.label, *(_share(rate) for rate in point.depth_rates)] for point in section.points
    ]
    padded = [[*row, *[_NONE] * (len(heads) - len(row))] for row in rows]
    return _table("acceptance rate by depth", heads, padded)


def _provenance(section: Section) -> str:
    heads = ("run", "folder", "target", "dtype", "device", "tree", "law", "seed", "commit")
    return _table("what was run", heads, [_facts(point) for point in section.points])


def _facts(point: Point) -> list[str]:
    record = point.run.record
    settings = record["settings"]
    law = [f"{name} {settings.get(name, default)}" for name, default in TRUNCATION.items()]
    return [
        point.label,
        str(point.run.folder),
        _known(settings.get("target")),
        _known(settings.get("dtype")),
        _known(record.get("device")),
        _known(settings.get("tree")),
        ", ".join(law),
        _known(settings.get("seed")),
        _known(record.get("git_commit"))[:12],
    ]


def _speed(speed: Speed, picture: Picture | None) -> list[str]:
    rows = [
        [
            arm.name,
            _ratio(arm.ratio),
            f"{arm.tokens_per_second:.1f}",
            _number(arm.acceptance_length, 2),
            _share(arm.same_ids),
        ]
        for arm in speed.arms.values()
    ]
    heads = ("arm", f"ratio to {speed.baseline}", "tokens / s", "tokens / cycle", "same ids")
    texts = [
        f"<h3>Measured side by side: {escape(str(speed.folder))}</h3>",
        _text(
            f"evaluation.speed on {speed.num_questions} questions, up to "
            f"{speed.settings.get('max_new_tokens', '?')} tokens, {speed.settings.get('dtype')} on "
            f"{speed.settings.get('device')}. Ratios are of seconds per token, medians over "
            "questions."
        ),
        *(_text(_sentence(note)) for note in speed.notes),
    ]
    if speed.num_left_out:
        texts.append(_text(f"{speed.num_left_out} questions do not fit the context: left out."))
    if speed.num_questions < speed.num_planned:
        texts.append(
            f'<p class="note">Unfinished: {speed.num_questions} of {speed.num_planned} questions '
            "are measured so far; the same command measures the others.</p>"
        )
    return [*texts, *_figure(picture), _table("arms", heads, rows)]


def _replay(replay: Replay, picture: Picture | None) -> list[str]:
    rows = [
        [
            f"{level:g}",
            row.rule,
            _number(row.acceptance_length, 3),
            f"{row.gain.value:+.1%} ({row.gain.low:+.1%} to {row.gain.high:+.1%})",
            _number(row.cost, 4),
        ]
        for level, row in replay.frontier
    ]
    heads = ("cost at most", "best rule", "tokens / cycle", "gain over exact", "its cost")
    return [
        f"<h3>All rules on the same trees: {escape(str(replay.folder))}</h3>",
        _text(
            f"evaluation.replay scored {len(replay.rows)} rules in expectation on the trees of "
            f"{replay.num_questions} exactly answered questions. Costs are {replay.cost_name}. The "
            "best of many on the questions that chose it flatters itself."
        ),
        *_figure(picture),
        _table("best rule by cost", heads, rows),
    ]


def _shown(pictures: Mapping[str, Picture], name: str) -> list[str]:
    return _figure(pictures.get(name))


def _figure(picture: Picture | None) -> list[str]:
    if picture is None:
        return []
    data = base64.b64encode(picture.png).decode("ascii")
    return [
        f'<figure><img src="data:image/png;base64,{data}" alt="{escape(picture.alt)}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    ]


def _table(name: str, heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls inside its own box; the first cell of a row names it."""
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">'
        f"<table><thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _text(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _percent(figure: Figure | None) -> str:
    if figure is None:
        return _NONE
    return f"{figure.value:.1%} ({figure.low:.1%} to {figure.high:.1%})"


def _ratio(figure: Figure | None, unit: str = "x") -> str:
    if figure is None:
        return _NONE
    return f"{figure.value:.2f}{unit} ({figure.low:.2f} to {figure.high:.2f})"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def _number(value: float | str | None, decimals: int) -> str:
    if value is None:
        return _NONE
    number = float(value)
    return f"{number:.{decimals}f}" if math.isfinite(number) else "infinite"


def _known(value: Any) -> str:
    return _NONE if value is None else str(value)
