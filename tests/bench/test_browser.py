"""The exported page in a real browser with no network: drawn, usable, and nothing complains."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edgellm.bench.html import render

from .factories import make_run, slower

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
USE = """<script>
for (const button of document.querySelectorAll(".legend button")) button.click();
for (const mark of document.querySelectorAll("[data-tip]"))
  mark.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: 9, clientY: 90}));
document.body.dataset.off = document.querySelectorAll("svg g.off").length;
document.body.dataset.tip = document.getElementById("tip").textContent;
</script></body>"""
ALONE = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--virtual-time-budget=2000",
)


MEASURE = """<script>
const label = document.querySelector("svg text");
document.body.dataset.label = Math.round(label.getBoundingClientRect().height);
document.body.dataset.over = document.documentElement.scrollWidth - innerWidth;
document.body.dataset.wide = innerWidth;
</script></body>"""


def opened(page: str, folder: Path, *flags: str) -> tuple[str, list[str]]:
    """(the page's DOM after its scripts, what its console said)."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    command = [str(BROWSER), *ALONE, f"--user-data-dir={folder / 'profile'}"]
    command += [*flags, "--dump-dom"]
    done = subprocess.run(
        [*command, file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_works_offline_and_its_console_is_empty(tmp_path: Path) -> None:
    old, new = make_run(label='a "quoted" one'), make_run(slower(2), label="b's")
    page = render([(1, old), (2, new)])
    dom, said = opened(page.replace("</body>", USE), tmp_path)
    assert said == []
    assert 'data-off="' in dom
    assert 'data-off="0"' not in dom
    assert 'data-tip=""' not in dom.split("<h1")[0]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_phone_has_axes_to_read_and_nothing_to_push_sideways(tmp_path: Path) -> None:
    page = render([(1, make_run(label="before")), (2, make_run(slower(2), label="after"))])
    dom, said = opened(page.replace("</body>", MEASURE), tmp_path, "--window-size=390,900")
    assert said == []
    found = {
        name: int(re.findall(rf'data-{name}="(-?\d+)"', dom)[0])
        for name in ("wide", "over", "label")
    }
    assert found["wide"] <= 600
    assert found["over"] <= 0
    assert found["label"] >= 11


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_complaint_would_be_heard(tmp_path: Path) -> None:
    broken = render([(1, make_run())]).replace("</body>", "<script>nonesuch()</script></body>")
    assert any("nonesuch is not defined" in line for line in opened(broken, tmp_path)[1])
