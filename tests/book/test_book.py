"""The whole book, built once, in a real browser: every page opens, links hold, search, keyboard, narrow and dark."""

import fcntl
import re
from dataclasses import dataclass
from html import unescape
from urllib.parse import unquote, urldefrag

import pytest

from flashladder.common.book.pages import document
from flashladder.common.paths import ROOT
from flashladder.tests.support.browser import CHROMIUM, Browser
from flashladder.tools.commands import main

pytest.importorskip("sphinx", reason="no Sphinx: pip install 'flashladder[book]'")

NARROW, WIDE = 400, 1280
STEP = "versions/forward/17_lazy_rescale/index.html"
SOURCES = (".cu", ".cuh", ".py", ".yaml", ".patch")  # as a page's name ends
FORMULAS = "versions/forward/index.html"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: sudo apt-get install chromium"),
]


@dataclass
class Page:
    """The places of a page, and where its links lead."""

    places: set[str]
    targets: set[str]


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The folder of the book, build/book: the first of several workers builds it."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if shared.name.startswith("popen-") else shared
    with open(shared / "book.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = shared / "book.built"
        assert built.exists() or main(["book"]) == 0
        built.touch()
    return ROOT / "build" / "book"


@pytest.fixture(scope="module")
def pages(book):
    return {path: page(path.read_text()) for path in sorted(book.rglob("*.html"))}


def page(text):
    """A page by its text: Sphinx's and the book's own has attributes in double quotes."""
    places, targets = (re.findall(rf'\s(?:{names})="([^"]+)"', text) for names in ("id", "href|src"))
    return Page({*map(unescape, places)}, {*map(unescape, targets)})


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path / "profile") as opened:
        opened.resize(WIDE)
        yield opened


def test_links_lead_somewhere(book, pages):
    assert len(pages) > 300
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            place, anchor = urldefrag(target)
            place = place.partition("?")[0]
            if ":" in place:
                continue
            file = (path.parent / unquote(place)).resolve() if place else path
            there = file.is_file() and (not anchor or file not in pages or unquote(anchor) in pages[file].places)
            broken += [] if there else [f"{path.relative_to(book)}: {target}"]
    assert not broken


def test_nothing_is_loaded_from_elsewhere(pages):
    """The book works without a network."""
    for path in pages:
        assert not [line for line in path.read_text().splitlines() if "<script" in line and "://" in line], path


def test_every_page_opens_in_a_narrow_window(book, pages, browser):
    """Of source files, whose pages differ in their text alone, some."""
    browser.resize(NARROW)
    files = [path for path in pages if path.stem.endswith(SOURCES)]
    assert len(files) > 200
    look = (
        "[document.documentElement.scrollWidth, [...document.images].filter((i) => !i.naturalWidth).map((i) => i.src)]"
    )
    faults = {}
    for path in pages.keys() - files | {*files[::20]}:
        browser.visit(path)
        width, broken = browser.see(look)
        if width > NARROW or broken or browser.complaints:
            faults[str(path.relative_to(book))] = (width, broken, browser.complaints[:])
    assert not faults


@pytest.mark.parametrize(("page", "cut"), [("results/ladder.html", "p:has(> img)"), ("index.html", ".table-wrapper")])
def test_what_a_narrow_window_cuts_has_a_shadow_there(book, browser, page, cut):
    browser.resize(NARROW)
    browser.visit(book / page)
    look = f"""[...document.querySelectorAll("article {cut}")].filter((e) => e.scrollWidth > e.clientWidth)
        .map((e) => getComputedStyle(e).backgroundImage)"""
    found = browser.see(look)
    assert found
    assert all("gradient" in image for image in found)


def test_search_finds_swizzle(book, browser):
    browser.visit(book / "search.html", "?q=swizzle")
    wait = """new Promise((done) => { const look = () => {
        const found = [...document.querySelectorAll("#search-results li a")].map((a) => a.textContent);
        found.length > 5 ? done(found) : setTimeout(look, 50); }; look(); })"""
    assert "02 Swizzling" in browser.see(wait)


def test_the_difference_of_a_rung_is_marked(book, browser):
    browser.visit(book / STEP)
    marked = """[".lower", ".upper"].map((side) => [...document.querySelectorAll(`.changed ${side}`)]
        .map((e) => e.innerText).join(" "))"""
    lower, upper = browser.see(marked)
    assert "OnlineSoftmax" in lower
    assert "LazySoftmax" not in lower
    assert "LazySoftmax" in upper
    assert "OnlineSoftmax" not in upper
    colour = """[".changed .upper", ".changed .lower", ".same .upper"].map((side) =>
        getComputedStyle(document.querySelector(side)).backgroundColor)"""
    assert len(set(browser.see(colour))) == 3


def test_formulas_have_their_script_and_fonts(book, browser):
    browser.visit(book / FORMULAS)
    browser.see("MathJax.startup.promise.then(() => document.fonts.ready).then(() => 0)")
    assert browser.see("document.querySelectorAll('mjx-container').length") > 5
    assert browser.see("[...document.fonts].some((font) => font.status === 'loaded' && font.family.includes('MJX'))")
    assert not browser.complaints


def test_the_keyboard_reaches_all(book, browser):
    """Each link, button, box and fold of a page, by Tab alone; what has a tooltip shows it then."""
    browser.visit(book / STEP)
    wanted = """window.wanted = [...document.querySelectorAll("a[href], button, input, summary, [tabindex='0']")]
        .filter((e) => e.checkVisibility({visibilityProperty: true}) && e.type !== "hidden" && e.type !== "checkbox");
        window.reached = new Set(); window.tips = 0; wanted.length"""
    count = browser.see(wanted)
    assert count > 60
    browser.see("""document.addEventListener("focusin", (event) => {
        reached.add(event.target);
        tips += event.target.dataset.meaning && !document.getElementById("meaning").hidden ? 1 : 0; }); 0""")
    for _ in range(count + 5):
        browser.press("Tab")
    assert browser.see("wanted.filter((e) => !reached.has(e)).map((e) => e.outerHTML.slice(0, 120))") == []
    assert browser.see("tips") > 5


def test_the_keyboard_opens_the_side_of_a_narrow_window(book, browser):
    browser.resize(NARROW)
    browser.visit(book / STEP)
    inside = 'document.querySelector(".sidebar-tree a").getBoundingClientRect().right > 0'
    assert not browser.see(inside)
    browser.see('document.querySelector("label[for=__navigation][tabindex]").focus()')
    browser.press("Enter")
    assert browser.see(f"new Promise((done) => setTimeout(() => done({inside}), 600))")


def test_light_and_dark(book, browser):
    colour = "getComputedStyle(document.body).backgroundColor"
    browser.visit(book / STEP)
    light = browser.see(colour)
    browser.resize(WIDE, dark=True)
    assert browser.see(colour) != light
    browser.see('[...document.querySelectorAll(".theme-toggle")].find((e) => e.checkVisibility()).focus()')
    browser.press("Enter")
    browser.press("Enter")
    assert browser.see("document.body.dataset.theme") in ("light", "dark")


def test_the_book_has_each_page_of_the_repository(book):
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "versions").glob("[a-q]*/*/README.md")]:
        assert (book / f"{document(page)}.html").exists(), page


def test_a_line_that_begins_with_a_percent_sign_is_text(book):
    """To MyST it would be a comment."""
    found = 0
    for page in (*(ROOT / "docs").glob("*.md"), *(ROOT / "versions").glob("[a-q]*/*/README.md")):
        for words in re.findall(r"\n% (\w+ \w+)", page.read_text()):
            found += 1
            assert f"% {words}" in (book / f"{document(page)}.html").read_text(), page
    assert found
