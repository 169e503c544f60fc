"""The page in a real browser, headless Chromium: what a person sees and does, wide and narrow, light and dark."""

import json
import re
import shutil
import subprocess

import pytest

from flashladder.common.records import ladders
from flashladder.common.report.dashboard import data
from flashladder.common.report.dashboard.page import render
from flashladder.tests.support import made_up

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LIGHT_PAGE, DARK_PAGE = "rgb(246, 247, 249)", "rgb(13, 17, 23)"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: sudo apt-get install chromium")

# Does what a person does, and puts what is seen then into the page's title.
SCRIPT = """
<script>
const seen = {};
const shown = (selector) => all(selector).filter((e) => !e.hidden).length;
const color = () => getComputedStyle(document.body).backgroundColor;
seen.overflow = root.scrollWidth - innerWidth;
const isCut = (e) => e.getBoundingClientRect().right > innerWidth;
seen.cut = all(".view:not([hidden]) .rungs th").filter(isCut).map((e) => e.textContent);
seen.pictures = all(".picture svg").filter((svg) => svg.getBoundingClientRect().width > 0).length;
const keys = all(".view:not([hidden]) .key li").map((e) => e.getBoundingClientRect()).filter((r) => r.width > 0);
seen.keys = [keys.length, keys.every((r) => r.left >= 0 && r.right <= innerWidth)];
seen.system = color();
seen.themes = [0, 1, 2].map(() => { button.click(); return [button.textContent, color()]; });
const bar = () => all(".view:not([hidden]) [data-tip] path")[0];
seen.paint = getComputedStyle(bar()).fill;
seen.view = [shown(".view"), document.querySelector(".view:not([hidden])").dataset.view];
all("[data-shows]")[1].click();
seen.other = [shown(".view"), document.querySelector(".view:not([hidden])").dataset.view];
seen.pressed = all("[data-shows]").map((b) => b.getAttribute("aria-pressed"));
bar().dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: innerWidth - 5, clientY: 40 }));
seen.tip = [tip.hidden, tip.textContent, tip.getBoundingClientRect().right <= innerWidth];
document.body.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
seen.tipGone = tip.hidden;
const box = document.getElementById("filter");
box.value = "02 EMULATOR"; box.dispatchEvent(new Event("input"));
seen.runs = shown("#runs tbody tr");
document.title = JSON.stringify(seen);
</script>
"""


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """The page of a folder with every kind of log, with the script at its end."""
    folder = tmp_path_factory.mktemp("results")
    log = made_up.ladder(folder)
    log.path.write_text(log.path.read_text() + "damaged\n")
    made_up.runs(folder)
    made_up.study(folder)
    made_up.opcodes(folder)
    results = data.Results.load(folder)
    path = folder / "dashboard.html"
    path.write_text(render(results, ladders.summary(results.ladders)).replace("</body>", f"{SCRIPT}</body>"))
    return path


def visit(path, tmp_path, width, *, dark=False):
    """What the script saw in a window of this width, and what the browser complained of."""
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--window-size={width},900", scheme]
    quiet = ["--enable-logging=stderr", "--log-level=0", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    command = [CHROMIUM, *options, *quiet, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)[1]
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert title.startswith("{"), complaints
    return json.loads(title.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")), complaints


@pytest.mark.parametrize(("width", "pictures", "has_keys"), [(1280, 5, False), (500, 4, True)])
def test_a_visit(html, tmp_path, width, pictures, has_keys):
    """Pictures: the ladder, where there is room for it, and the roofline of one view, two mixes, the study.

    Where a picture may be cut, its legend is a list that is not.
    """
    seen, complaints = visit(html, tmp_path, width)
    assert complaints == []
    assert seen["overflow"] <= 0
    assert seen["pictures"] == pictures
    assert seen["cut"] == []
    assert (seen["keys"][0] > 3) == has_keys
    assert seen["keys"][1]
    assert seen["view"] == [1, "h100-bf16"]
    assert seen["other"] == [1, "h100-fp16"]
    assert seen["pressed"] == ["false", "true"]
    hidden, text, inside = seen["tip"]
    assert not hidden
    assert "TFLOP/s, ratio" in text
    assert inside
    assert seen["tipGone"]
    assert seen["runs"] == 2


def test_light_and_dark(html, tmp_path):
    seen, _ = visit(html, tmp_path, 1280)
    assert seen["system"] == LIGHT_PAGE
    assert seen["themes"] == [["light", LIGHT_PAGE], ["dark", DARK_PAGE], ["auto", LIGHT_PAGE]]
    assert seen["paint"] == "rgb(0, 102, 194)"
    seen, _ = visit(html, tmp_path, 1280, dark=True)
    assert seen["system"] == DARK_PAGE
    assert seen["themes"] == [["light", LIGHT_PAGE], ["dark", DARK_PAGE], ["auto", DARK_PAGE]]
    assert seen["paint"] == "rgb(94, 176, 255)"
