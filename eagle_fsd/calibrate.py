"""Choosing a knob from one's own prompts: decode exactly, score a grid of rules on the trees."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_fsd.acceptance import RULES, AcceptanceRule, Exact, build_rule
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.files import read_lines, whole_file, write_text
from eagle_fsd.recorder import Expectation, Recorder

# Grids wide enough to run from "next to nothing" to "nearly everything" on models seen so far.
_NATS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, math.inf)
_UNIT = (0.02, 0.05, *(n / 20 for n in range(2, 14)), 0.67, 0.69)
_THRESHOLDS = {"js": (*_UNIT, math.inf), "tv": (*_UNIT, 0.75, 0.8, 0.85, 0.9, 0.95, math.inf)}
_KNOBS: dict[str, tuple[float, ...]] = {
    "coverage": _NATS,
    "lenience": (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05),
    "cactus": (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0),
    "head_set": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99),
    "cascade_opt": (-8.0, -4.0, -2.0, -1.0, -0.5, -0.25, -0.1, 0.0, 0.1, 0.25, 0.5),
    "regret": _NATS,
    "typical": (0.5, 0.3, 0.2, 0.1, 0.09, 0.05, 0.02, 0.01),
}


@dataclass(frozen=True)
class Row:
    """One rule of the grid.

    Attributes:
        rule: as it is written for --rule.
        expectation: what it would have done on the recorded trees.
    """

    rule: str
    expectation: Expectation


@dataclass(frozen=True)
class Calibration:
    """What a run of `calibrate` found.

    Attributes:
        exact: the exact rule on the same trees.
        rows: the grid, in the order it was given.
        is_greedy: whether costs are regret (temperature 0) or KL.
        num_prompts: prompts decoded.
        settings: what it was run with.
    """

    exact: Expectation
    rows: list[Row]
    is_greedy: bool
    num_prompts: int
    settings: dict[str, Any]

    @property
    def cost_name(self) -> str:
        """What the costs are."""
        return "regret" if self.is_greedy else "KL"

    def within_cost(self, max_cost_per_token: float) -> Row | None:
        """The row with the greatest acceptance length, above exact's, at no more than this cost."""
        fitting = [
            row
            for row in self.rows
            if row.expectation.cost_per_token <= max_cost_per_token
            and row.expectation.acceptance_length > self.exact.acceptance_length
        ]
        return max(fitting, key=lambda row: row.expectation.acceptance_length, default=None)

    def for_gain(self, gain: float) -> Row | None:
        """The cheapest row whose acceptance length is at least (1 + gain) times the exact one's."""
        wanted = (1.0 + gain) * self.exact.acceptance_length
        fitting = [row for row in self.rows if row.expectation.acceptance_length >= wanted]
        return min(fitting, key=lambda row: row.expectation.cost_per_token, default=None)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [Row("exact", self.exact), *self.rows]
        return {
            "cost": f"{self.cost_name} per token, nats",
            "num_prompts": self.num_prompts,
            "settings": self.settings,
            "rows": [{"rule": row.rule, **figures(row.expectation)} for row in rows],
        }

    def table(self) -> str:
        """For people."""
        head = f"{'rule':<34}{'length':>8}{'gain':>8}{'rescued':>9}{self.cost_name + '/token':>14}"
        lines = [f"{head}{'poor mass':>11}{'doubled':>9}"]
        for row in [Row("exact", self.exact), *self.rows]:
            e = row.expectation
            gain = e.acceptance_length / self.exact.acceptance_length - 1.0
            lines.append(
                f"{row.rule:<34}{e.acceptance_length:>8.3f}{gain:>8.1%}{e.share_rescued:>9.2%}"
                f"{e.cost_per_token:>14.4f}{e.poor_mass / e.num_tokens:>11.4f}"
                f"{e.doubled_mass / e.num_tokens:>9.4f}"
            )
        return "\n".join(lines)


def grid(
    rule: str, divergences: Sequence[str] = (), knobs: Sequence[float] = ()
) -> list[AcceptanceRule]:
    """Rules over a grid of knobs.

    Args:
        rule: a rule's name; a written form with a knob is one point.
        divergences: for rules that have one; default js.
        knobs: instead of the rule's own grid.

    Raises:
        ValueError: for an unknown rule or divergence, or a knob outside its domain.
    """
    if ":" in rule:
        if divergences or knobs:
            raise ValueError(
                f"rule {rule!r} is one point of the grid; give a rule's name alone to vary its "
                "divergence or its knob"
            )
        return [build_rule(rule)]
    kind = RULES.get(rule)
    if kind is None or kind is Exact:
        build_rule(rule)  # names the nearest for an unknown one
        raise ValueError(
            "rule 'exact' has no knob to choose; calibrate a relaxed rule, such as fuzzy"
        )
    first = next(field.name for field in dataclasses.fields(kind) if field.name != "budget")
    if not has_divergence(rule):
        if divergences:
            raise ValueError(f"rule {rule!r} compares no laws and takes no divergence")
        return [build_rule(rule, **{first: knob}) for knob in knobs or _KNOBS[rule]]
    return [
        build_rule(rule, divergence=divergence, **{first: knob})
        for divergence in divergences or ("js",)
        for knob in knobs or _THRESHOLDS.get(divergence.partition("@")[0], _NATS)
    ]


def grids(
    rules: Sequence[str], divergences: Sequence[str] = (), knobs: Sequence[float] = ()
) -> list[AcceptanceRule]:
    """The grids of several rules; divergences go to those that compare laws, one at least."""
    takes = [rule in RULES and has_divergence(rule) for rule in rules]
    return [
        point
        for rule, with_divergence in zip(rules, takes, strict=True)
        for point in grid(rule, divergences if with_divergence or not any(takes) else (), knobs)
    ]


def has_divergence(rule: str) -> bool:
    """Whether a rule, by its name, compares laws by a divergence of choice."""
    return any(field.name == "divergence" for field in dataclasses.fields(RULES[rule]))


def family(rule: str) -> str:
    """A written form without its first knob: the line that it lies on in a picture."""
    name, _, knobs = rule.partition(":")
    return ":".join([name, *knobs.split(":")[1:]])


def read_prompts(path: str | Path) -> list[str]:
    """First turns of a FastChat question file, "prompt" fields of JSON lines, or lines of text.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a malformed line, by its number, a file without prompts, or one that is no
            UTF-8 text.
    """
    path = Path(path)
    prompts: list[str] = []
    lines = read_lines(path, "prompt file")
    if path.suffix == ".json":
        raise ValueError(f"{path} is one JSON document; write JSON lines (.jsonl) or lines of text")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_prompt(line, number, path) if line.lstrip().startswith("{") else line)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def _prompt(line: str, number: int, path: Path) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not valid JSON ({error.msg})") from error
    turns = record.get("turns")
    prompt = turns[0] if isinstance(turns, list) and turns else record.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{path}, line {number}: needs "turns" (a list of texts) or "prompt"')
    return prompt


def calibrate(
    decoder: SpeculativeDecoder,
    prompts: Iterable[str],
    rules: Sequence[AcceptanceRule | str],
    options: dict[str, Any],
    progress: bool = True,
) -> Calibration:
    """Decodes the prompts exactly and scores the rules on every tree.

    Args:
        decoder: with the drafter and tree that will be used.
        prompts: the user's own.
        rules: see `grid`.
        options: of the requests: temperature, top_p, max_new_tokens, seed, ...; not the rule.
        progress: show a bar on stderr.

    Raises:
        ValueError: no rule or no prompt, a rule that does not go with the drafter, or a prompt that
            cannot be decoded, by its number.
    """
    texts, exact = list(prompts), Exact()
    recorder = Recorder([exact, *rules])
    if reserved := {"rule", "observer"} & options.keys():
        raise ValueError(f"calibrate sets {sorted(reserved)} itself; leave them out of the options")
    if not rules:
        raise ValueError("no rule to calibrate; give at least one, such as fuzzy")
    if not texts:
        raise ValueError("no prompt to calibrate on; give at least one")
    for rule in recorder.rules:
        decoder.check_rule(rule)
    tree = ""
    bar = tqdm(texts, desc="decoding exactly", unit="prompt", disable=not progress)
    for number, prompt in enumerate(bar, start=1):
        try:
            result = decoder.generate(prompt, rule=exact, observer=recorder.observe, **options)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
        tree = result.stats.tree
    totals = recorder.totals
    if recorder.num_trees == 0:
        raise ValueError("no tree was scored; raise max_new_tokens or give longer prompts")
    rows = [
        Row(rule.spec, total) for rule, total in zip(recorder.rules[1:], totals[1:], strict=True)
    ]
    settings = {"tree": tree, **options}
    return Calibration(totals[0], rows, recorder.is_greedy, len(texts), settings)


def make_folder(folder: str | Path) -> Path:
    """The output folder, made when it is absent.

    Raises:
        ValueError: when it is empty text, or a file.
    """
    if not str(folder):
        raise ValueError("the output folder is empty; name one, . is the current one")
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"output {str(folder)!r} is a file; name a folder")
    path.mkdir(parents=True, exist_ok=True)
    return path


def save(calibration: Calibration, folder: str | Path) -> tuple[Path, Path]:
    """Writes calibration.json and calibration.png, each whole or not at all.

    Raises:
        OSError: on a full disk; a file that is written already stays.
    """
    folder = make_folder(folder)
    text, picture = folder / "calibration.json", folder / "calibration.png"
    try:
        write_text(text, json.dumps(calibration.to_dict(), indent=1, default=str) + "\n")
        with whole_file(picture) as temporary:
            _plot(calibration, temporary)
    except OSError as error:
        raise OSError(f"cannot write into {str(folder)!r}: {error.strerror or error}") from error
    return text, picture


def figures(e: Expectation) -> dict[str, float | str]:
    """Figures per token, ready for JSON, which has no infinity: "inf" then."""
    numbers = {
        "acceptance_length": e.acceptance_length,
        "share_rescued": e.share_rescued,
        "cost_per_token": e.cost_per_token,
        "poor_mass_per_token": e.poor_mass / e.num_tokens,
        "doubled_mass_per_token": e.doubled_mass / e.num_tokens,
        "num_cycles": e.num_cycles,
    }
    return {name: x if math.isfinite(x) else str(x) for name, x in numbers.items()}


def _plot(calibration: Calibration, path: Path) -> None:
    """Acceptance length against cost per token, a line for each rule and divergence."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines: dict[str, list[Expectation]] = {}
    for row in calibration.rows:
        lines.setdefault(family(row.rule), []).append(row.expectation)
    for kind, points in lines.items():
        shown = [point for point in points if math.isfinite(point.cost_per_token)]
        shown.sort(key=lambda point: point.cost_per_token)
        axes.plot(
            [point.cost_per_token for point in shown],
            [point.acceptance_length for point in shown],
            marker="o",
            markersize=3,
            label=kind,
        )
    axes.axhline(calibration.exact.acceptance_length, color="grey", linestyle=":", label="exact")
    axes.set_xlabel(f"{calibration.cost_name} per token (nats)")
    axes.set_ylabel("predicted acceptance length")
    axes.legend()
    figure.savefig(path, format="png", dpi=130)
