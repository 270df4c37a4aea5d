"""A draft tree as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from eagle_fsd.demo.answer import ShownTree
from eagle_fsd.demo.render import probability_text, token_text
from tree import DraftTree

_COLUMN: Final = 132
_ROW: Final = 26
_WIDTH: Final = 104
_HEIGHT: Final = 20
_MARGIN: Final = 8
_MAX_CHARACTERS: Final = 8


def tree_html(shown: ShownTree | None) -> str:
    """The last cycle's tree in a box that scrolls, or a place holder."""
    if shown is None:
        return '<p class="status">The last draft tree appears here.</p>'
    svg = tree_svg(shown.tree, shown.texts, shown.path)
    return f'<div class="tree" tabindex="0" aria-label="last draft tree">{svg}</div>'


def tree_svg(tree: DraftTree, texts: Sequence[str], path: Sequence[int]) -> str:
    """Draws a tree from left to right, one column per depth.

    Args:
        tree: N nodes.
        texts: N texts, the nodes' tokens.
        path: rows that were taken, root left out; they are highlighted with the root.

    Returns:
        An <svg> element: each node with its token, the draft's probability of it after its parent
        (in its label) and, as a title, that of the whole path to it.

    Raises:
        ValueError: when the number of texts is not N.
    """
    if len(texts) != tree.num_nodes:
        raise ValueError(f"a tree of {tree.num_nodes} nodes needs as many texts, got {len(texts)}")
    parents, depths, scores = tree.parents.tolist(), tree.depths.tolist(), tree.scores.tolist()
    heights = _heights(parents)
    taken = {0, *path}
    edges, nodes = [], []
    for row, (parent, depth, score) in enumerate(zip(parents, depths, scores, strict=True)):
        left, middle = _MARGIN + depth * _COLUMN, _MARGIN + heights[row] * _ROW + _HEIGHT / 2
        kind = ' class="taken"' if row in taken else ""
        if parent >= 0:
            start = left - _COLUMN + _WIDTH
            before = _MARGIN + heights[parent] * _ROW + _HEIGHT / 2
            bend = (start + left) / 2
            edges.append(
                f'<path{kind} d="M{start:g} {before:g}C{bend:g} {before:g} {bend:g} {middle:g} '
                f'{left:g} {middle:g}"/>'
            )
        odds = probability_text(score - scores[parent]) if parent >= 0 else ""
        title = f"{token_text(texts[row])}: path probability {probability_text(score)}"
        nodes.append(
            f'<g{kind} transform="translate({left:g} {middle - _HEIGHT / 2:g})">'
            f'<title>{escape(title)}</title><rect width="{_WIDTH}" height="{_HEIGHT}" rx="4"/>'
            f'<text x="5" y="14">{escape(_short(texts[row]))}</text>'
            f'<text class="odds" x="{_WIDTH - 5}" y="14" text-anchor="end">{odds}</text></g>'
        )
    width = 2 * _MARGIN + max(depths) * _COLUMN + _WIDTH
    height = 2 * _MARGIN + max(heights) * _ROW + _HEIGHT
    label = f"draft tree of {tree.num_nodes - 1} tokens, {len(path)} of them taken"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" '
        f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">'
        f"{''.join(edges)}{''.join(nodes)}</svg>"
    )


def _heights(parents: Sequence[int]) -> list[float]:
    """Vertical places in rows: leaves one below the other, a parent in the middle of its own."""
    children: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(row)
    order, stack = [], [0]
    while stack:
        row = stack.pop()
        order.append(row)
        stack += reversed(children[row])
    heights = [0.0] * len(parents)
    num_leaves = 0
    for row in order:
        if not children[row]:
            heights[row] = float(num_leaves)
            num_leaves += 1
    for row in reversed(order):
        if children[row]:
            heights[row] = (heights[children[row][0]] + heights[children[row][-1]]) / 2
    return heights


def _short(text: str) -> str:
    shown = token_text(text)
    return shown if len(shown) <= _MAX_CHARACTERS else f"{shown[: _MAX_CHARACTERS - 1]}\u2026"
