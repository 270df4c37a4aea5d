"""One page about evaluation runs: quality against speed, and what is behind it.

python -m evaluation.report runs/exact runs/fuzzy-0.1 runs/fuzzy-0.3 speed replay --output report

The folders are those of evaluation.run, one of them exact (or plain), and optionally of
evaluation.speed and evaluation.replay; they are told apart by their files. Each task and
temperature is a section. Scores are read from scores.json where evaluation.score was run, else
made anew, without running any code. Exact runs with --min-p, --top-p or --top-k are the control
that every relaxed rule has to beat. Speed-ups are per token, and paired ones of evaluation.speed go
before those of separate runs. report.html needs no other file; its pictures also lie beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from eagle_fsd.calibrate import make_folder
from eagle_fsd.command import Parser, run
from eagle_fsd.files import whole_file, write_text
from evaluation.answers import safe_model_id
from evaluation.charts import Picture, replay_picture, section_pictures, speed_picture
from evaluation.report_page import Illustrated, page
from evaluation.report_sections import Section, read_sections

PAGE_FILE = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; a user's error is one line on stderr and status 2."""
    args = build_parser().parse_args(argv)
    return run(lambda: _report(args))


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="python -m evaluation.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", metavar="DIR", help="of run, speed and replay")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help=f"folder for {PAGE_FILE} and its pictures"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the intervals (default 0)")
    return parser


def _report(args: argparse.Namespace) -> None:
    if args.seed < 0:
        raise ValueError(f"--seed must be >= 0, got {args.seed}")
    sections = read_sections(args.folders, args.seed)
    parts = [illustrate(section, number) for number, section in enumerate(sections, start=1)]
    paths = write(parts, make_folder(args.output))
    print(f"written: {paths[0]} and {len(paths) - 1} pictures")


def illustrate(section: Section, number: int) -> Illustrated:
    """A section with all its pictures, whose names say where they belong.

    Args:
        section: the figures.
        number: of the section on its page: names of tasks can look alike as names of files.
    """
    prefix = f"{number}-{safe_model_id(f'{section.task}-t{section.temperature:g}')}"

    def named(picture: Picture | None, place: int = 1) -> Picture | None:
        if picture is None:
            return None
        suffix = "" if place == 1 else f"-{place}"
        return dataclasses.replace(picture, file_name=f"{prefix}-{picture.name}{suffix}.png")

    return Illustrated(
        section,
        [p for picture in section_pictures(section) if (p := named(picture))],
        [named(speed_picture(each), n) for n, each in enumerate(section.speeds, start=1)],
        [named(replay_picture(each), n) for n, each in enumerate(section.replays, start=1)],
    )


def write(parts: Sequence[Illustrated], folder: Path) -> list[Path]:
    """Writes the page and its pictures, each whole or not at all.

    Returns:
        Their paths, the page first.

    Raises:
        OSError: when a file cannot be written.
    """
    path, text = folder / PAGE_FILE, page(parts)
    pictures = [picture for part in parts for picture in part.all_pictures()]
    for picture in pictures:
        with whole_file(folder / picture.file_name) as temporary:
            temporary.write_bytes(picture.png)
    write_text(path, text)
    return [path, *(folder / picture.file_name for picture in pictures)]


if __name__ == "__main__":
    raise SystemExit(main())
