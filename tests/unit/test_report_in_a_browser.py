"""The report in headless Chromium: axes, legends and units are on the screen, whole, and nothing scrolls sideways.

Screenshots are kept in ``build/screenshots``, to be looked at. Skipped where Chromium is not installed.
"""

from __future__ import annotations

import html as html_text
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy.extras import cli
from ls_strategy.extras.callbacks.step_figures import draw_memory, draw_time
from tests.unit.report_runs import monitored, run_file, start, tensorboard
from tests.unit.test_step_figures import two_ranks

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
WIDTHS = (400, 1280)

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

MEASURE = """
<script>
const seen = (element) => { const r = element.getBoundingClientRect(); return r.width > 0 && r.height > 0; };
addEventListener("load", () => {
  const all = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement;
    const figures = [...page.querySelectorAll("figure")].filter((f) => f.querySelector(":scope > svg")).map((f) => {
      const svg = f.querySelector(":scope > svg"), box = svg.getBoundingClientRect();
      const texts = [...svg.querySelectorAll("text")];
      const cut = texts.filter((t) => { const r = t.getBoundingClientRect();
        return r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1; });
      const ticks = texts.filter((t) => !t.closest(".unit, .label, .inside")).map((t) => t.getBoundingClientRect());
      const overlap = ticks.some((a, i) => ticks.some((b, j) => i < j &&
        a.left < b.right && b.left < a.right && a.top < b.bottom - 2 && b.top < a.bottom - 2));
      return { title: f.querySelector("figcaption").textContent,
        unit: [...svg.querySelectorAll(".unit, .label")].filter(seen).map((t) => t.textContent),
        ticks: ticks.length, cut: cut.map((t) => t.textContent), overlap,
        legend: [...f.querySelectorAll(".legend li")].filter(seen).map((t) => t.textContent),
        drawn: new Set([...svg.querySelectorAll(".named")].filter((p) => p.getBoundingClientRect().width > 0)
          .map((p) => p.querySelector("title").textContent)).size,
        font: texts.length ? texts[0].getBoundingClientRect().height : 0,
        colours: [...new Set([...svg.querySelectorAll(".named > path")].map((p) => getComputedStyle(p).stroke +
          getComputedStyle(p).strokeDasharray))].length };
    });
    all[frame.name] = { wide: root.scrollWidth, room: root.clientWidth, height: root.scrollHeight, figures,
      images: [...page.images].map((i) => i.naturalWidth > 0),
      out: [...page.querySelectorAll("body *")].filter((e) => !e.closest(".scroll, nav, pre, .skip, .hidden, svg") &&
        e.getBoundingClientRect().right > root.clientWidth + 1).map((e) => e.outerHTML.slice(0, 80)),
      back: getComputedStyle(page.body).backgroundColor, ink: getComputedStyle(page.body).color };
  }
  document.getElementById("found").textContent = JSON.stringify(all);
});
</script><pre id="found"></pre>
"""


def chromium(profile: Path, *arguments: str) -> str:
    """Run it with an empty profile; returns what it prints."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    shutil.rmtree(profile, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def measured(html: str, folder: Path, *flags: str) -> dict[str, Any]:
    """What a browser makes of the page in a window of each width."""
    frames = "".join(
        f'<iframe name="{w}" width="{w}" height="900" style="border:0" srcdoc="{html_text.escape(html)}"></iframe>'
        for w in WIDTHS
    )
    wrapper = folder / "measure.html"
    wrapper.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">{frames}{MEASURE}</body>')
    dom = chromium(folder / "profile", "--window-size=1700,1000", *flags, "--dump-dom", wrapper.as_uri())
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    return json.loads(html_text.unescape(found))


def screenshot(html: str, folder: Path, name: str, width: int, height: int, *flags: str) -> Path:
    """Keep a picture of the whole page at a width."""
    wrapper = folder / "picture.html"
    frame = f'<iframe width="{width}" height="{height}" style="border:0" srcdoc="{html_text.escape(html)}"></iframe>'
    wrapper.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">{frame}</body>')
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{name}.png"
    path.unlink(missing_ok=True)
    size = f"--window-size={max(width, 500)},{height}"
    chromium(folder / "profile", size, *flags, f"--screenshot={path}", wrapper.as_uri())
    return path


def report_of(folder: Path, *, runs: int) -> str:
    """A report of runs of two ranks, with images, a restart, a NaN, and many points."""
    for i in range(runs):
        here = folder / ("run" if runs == 1 else f"a long name of a run, number {i}")
        scalars = monitored(400)
        scalars["train/loss"][100 + i] = math.nan
        tensorboard(here, scalars)
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(here))
        writer.add_image("zero_time/step", draw_time(two_ranks(), 20), 20)
        writer.add_image("zero_memory/step", draw_memory(two_ranks(), 20), 20)
        writer.close()
        run_file(here, start(options={"stage": i}), start(2000), {"event": "end", "step": 4000})
        (here / "hparams.yaml").write_text("a_long_line: " + "word " * 100 + "\n")
    output = folder / "report.html"
    assert cli.main(["report", str(folder), "-o", str(output)]) == 0
    return output.read_text()


@pytest.mark.parametrize("runs", [1, 3])
def test_axes_legends_and_units_are_on_the_screen_and_nothing_scrolls_sideways(runs: int, tmp_path: Path) -> None:
    html = report_of(tmp_path / "runs", runs=runs)
    found = measured(html, tmp_path)
    for width in WIDTHS:
        page = found[str(width)]
        assert page["room"] == width
        assert page["wide"] <= width, page["out"]
        assert page["out"] == []
        assert len(page["figures"]) > 8
        assert page["images"] == [True] * 2 * runs
        for figure in page["figures"]:
            assert figure["unit"], figure
            assert all(figure["unit"])
            assert figure["legend"], figure
            assert figure["ticks"] >= 3, figure
            assert figure["drawn"] >= len(figure["legend"]) - 2, (
                figure
            )  # without the mark of a restart, and empty phases
            assert figure["cut"] == [], figure
            assert not figure["overlap"], figure
            assert figure["font"] >= 10, figure
        units = {unit for figure in page["figures"] for unit in figure["unit"]}
        assert {
            "optimizer step",
            "tokens per second",
            "MFU, %",
            "GiB",
            "MiB per step",
            "GB/s",
            "ms per optimizer step",
        } <= units
        loss = next(f for f in page["figures"] if f["title"].startswith("Loss"))
        assert loss["colours"] == (2 if runs == 1 else 3)  # by color and dash
        path = screenshot(html, tmp_path, f"report_{runs}_runs_{width}", width, page["height"] + 10)
        assert_drawn(path, width)


def test_dark_pages_are_dark_and_readable(tmp_path: Path) -> None:
    html = report_of(tmp_path / "runs", runs=1)
    dark = "--blink-settings=preferredColorScheme=0"
    light, found = measured(html, tmp_path)["1280"], measured(html, tmp_path, dark)["1280"]
    assert contrast(light["back"], light["ink"]) > 7
    assert contrast(found["back"], found["ink"]) > 7
    assert luminance(found["back"]) < 0.1
    assert luminance(light["back"]) > 0.8
    assert_drawn(screenshot(html, tmp_path, "report_dark_1280", 1280, found["height"] + 10, dark), 1280)


def assert_drawn(path: Path, width: int) -> None:
    """The picture has the width of the page, and many colors."""
    from PIL import Image

    with Image.open(path) as image:
        assert image.width == max(width, 500)
        assert len(image.convert("RGB").resize((400, 2000)).getcolors(1 << 20) or ()) > 50


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2."""
    linear = [(c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4) for c in
              (int(n) / 255 for n in re.findall(r"\d+", colour)[:3])]  # fmt: skip
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio, WCAG 2."""
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_colours_of_lines_have_contrast_in_light_and_dark() -> None:
    from ls_strategy.extras.report import charts

    def rgb(colour: str) -> str:
        return ",".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))

    assert all(contrast(rgb(c), "255,255,255") >= 3 for c in charts.LINES)
    assert all(contrast(rgb(c), rgb("#1d2125")) >= 3 for c in charts.DARK_LINES)
    assert torch.tensor([len({*charts.LINES}), len({*charts.DARK_LINES}), len({*charts.DASHES})]).eq(8).all()
