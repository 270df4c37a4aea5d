"""The report in a real browser, opened as a file."""

from __future__ import annotations

import shutil

import pytest

from evaluation.report import main
from tests.evaluation.test_report import save_all

pytestmark = pytest.mark.browser

WIDTHS = {"phone": 390, "desktop": 1280}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    assert main([*save_all(folder / "runs"), "--output", str(folder / "out")]) == 0
    # Nothing else may be needed: the page is opened far from its pictures.
    path = folder / "alone" / "report.html"
    path.parent.mkdir()
    shutil.copy(folder / "out" / "report.html", path)
    return path.as_uri()


@pytest.fixture(params=[(size, scheme) for size in WIDTHS for scheme in ("light", "dark")])
def page(browser, url, request):
    """The page at one width in one scheme, its console and its requests watched."""
    size, scheme = request.param
    viewport = {"width": WIDTHS[size], "height": 800}
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text))
    asked: list[str] = []
    page.on("request", lambda each: asked.append(each.url))
    page.goto(url)
    page.wait_for_load_state("load")
    yield page
    context.close()
    assert problems == []
    assert [each for each in asked if not each.startswith("data:")] == [url]


def test_the_page_fits_and_all_pictures_are_shown(page):
    width = page.viewport_size["width"]
    sizes = page.evaluate(
        "[document.documentElement.scrollWidth, document.body.scrollWidth, window.innerWidth]"
    )
    assert max(sizes) == width
    images = page.evaluate(
        """[...document.images].map(image =>
            [image.complete, image.naturalWidth, image.getBoundingClientRect().right, image.alt])"""
    )
    assert len(images) == 12
    assert all(complete and natural > 0 for complete, natural, _, _ in images)
    assert all(right <= width for _, _, right, _ in images)
    assert all(alt for *_, alt in images)


def test_wide_tables_scroll_in_their_own_box(page):
    boxes = page.evaluate(
        """[...document.querySelectorAll('.scroll')].map(box =>
            [box.scrollWidth, box.clientWidth, box.tabIndex, box.getAttribute('aria-label')])"""
    )
    assert max(scroll - client for scroll, client, _, _ in boxes) > 0
    assert all(tab == 0 and label for _, _, tab, label in boxes)
    box = page.get_by_role("region", name="all runs").first
    box.evaluate("each => { each.scrollLeft = each.scrollWidth }")
    # The name of a run stays in sight.
    name = box.locator("tbody th").first
    assert name.bounding_box()["x"] >= box.bounding_box()["x"]
    assert page.evaluate("window.scrollX") == 0


def test_text_can_be_read_in_both_schemes(page):
    contrast = page.evaluate(
        """(() => {
            const light = text => {
                const parts = text.match(/[0-9.]+/g).slice(0, 3).map(each => each / 255);
                const linear = parts.map(
                    c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
                return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
            };
            const back = light(getComputedStyle(document.body).backgroundColor);
            return [document.body, document.querySelector('.soft')].map(each => {
                const ink = light(getComputedStyle(each).color);
                return (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
            });
        })()"""
    )
    assert min(contrast) >= 4.5  # WCAG 2.1, 1.4.3
