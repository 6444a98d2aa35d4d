"""The pages in a real browser: opened from disk, stepped and played through, by mouse and by keyboard.

Needs a Chromium, which no Python package brings: `apt-get install chromium`, or PACELINE_BROWSER=PATH. Skipped without.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.conf.entry import load
from paceline.decode.pages import training_page
from paceline.models.drafter import Shape, build, options
from paceline.models.embedded import folder
from paceline.models.export import save_export
from paceline.models.target import Target
from paceline.scripts import evaluate, watch

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[browser]'")
accessibility = pytest.importorskip("axe_playwright_python.sync_playwright")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATHS = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = os.environ.get("PACELINE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the path (PACELINE_BROWSER=PATH names another)")
    with api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a report and a watched answer of untrained heads."""
    out = tmp_path_factory.mktemp("pages")
    target = Target.load(folder("tiny"), "float32", vocab=259)
    drafter = build(options("medusa")(name="medusa", heads=3), Shape.of(target))
    drafter.start(target)
    about = {"name": "tiny", "path": None, "fingerprint": target.fingerprint, "vocab": target.vocab}
    export = save_export(drafter, out / "export", "float32", about, tree={"paths": PATHS})
    small = [f"drafter={export}", "dtype=float32", f"out={out}"]
    evaluate.run(load("evaluate", *small, "eval.limit=2", "eval.max_new_tokens=10", "traces=2", "hf_baseline=false"))
    watch.run(load("watch", *small, "max_new_tokens=8", "prompt=hi"))
    lines: list[dict[str, Any]] = [
        {
            "step": n,
            "tokens": 90 * n,
            "loss": [3 / n] * 4,
            "accuracy": [0.1 * n] * 4,
            "lr": 1e-3,
            "tokens_per_second": 9,
        }
        for n in range(1, 9)
    ]
    lines.append({"step": 8, "tokens": 720, "mean_acceptance_length": 1.5, "held_out_accuracy": [0.5]})
    config = {"method": {"name": "medusa"}, "target": {"name": "tiny"}, "data": {"source": "self"}}
    (out / "training.html").write_text(training_page(config, "seed: 0", lines))
    return out


class Opened:
    """A page from disk; what it logs and asks for is kept."""

    def __init__(self, browser: Any, file: Path, width: int = 1280, theme: str = "light"):
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.problems: list[str] = []
        self.page.on("console", lambda said: self.problems.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda asked: self.asked.append(asked.url))
        self.asked: list[str] = []
        self.page.goto(file.as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *failed: Any) -> None:
        self.page.close()
        if failed[0] is None:
            assert self.problems == []
            assert [url for url in self.asked if not url.startswith(("file:", "data:"))] == []


def tokens(page: Any, where: str) -> list[int]:
    return page.eval_on_selector_all(f"{where} [data-token]", "all => all.map((one) => Number(one.dataset.token))")


def replayed(page: Any, said: dict[str, Any]) -> None:
    """Step through all of a trace; every node and word on the screen is that of the file."""
    text = [said["start"]]
    assert tokens(page, ".drafted-text") == text
    for one in said["rounds"]:
        for phase in range(3):
            page.click(".step")
            assert (
                page.locator(".phases li[aria-current]").inner_text()
                == page.locator(".phases li").nth(phase).inner_text()
            )
            own = one["new"][-1:] if phase == 2 and one["own"] is not None else []
            assert tokens(page, ".stage") == one["tokens"] + own
            kept = [one["tokens"][node] for node in one["path"][1:]] if phase == 2 else []
            shown = page.eval_on_selector_all(".stage g.kept", "all => all.map((one) => Number(one.dataset.token))")
            assert shown == kept
        text += one["new"]
        assert tokens(page, ".drafted-text") == text == said["tokens"][: len(text)]
    assert text == said["tokens"]


@pytest.mark.parametrize("name", ["report", "watch"])
def test_the_tokens_shown_are_those_of_the_file(browser: Any, pages: Path, name: str) -> None:
    said = json.loads((pages / f"{name}.json").read_text())["trace"]["prompts"]
    with Opened(browser, pages / f"{name}.html") as page:
        for number, one in enumerate(said):
            if len(said) > 1:
                page.select_option(".which", str(number))
            replayed(page, one)
            assert page.locator(".asked").inner_text().strip() == one["prompt"].strip()


def test_the_trace_plays_by_itself_until_plain_decoding_has_caught_up(browser: Any, pages: Path) -> None:
    (said,) = json.loads((pages / "watch.json").read_text())["trace"]["prompts"]
    with Opened(browser, pages / "watch.html") as page:
        page.select_option(".speed", "200")
        page.click(".play")
        assert page.locator(".play").inner_text() == "Pause"
        api.expect(page.locator(".play")).to_have_text("Play", timeout=60_000)
        assert tokens(page, ".drafted-text") == said["tokens"] and tokens(page, ".plain-text") == said["plain"]
        passes = len(said["plain"]) - 1
        assert f"{passes} passes, {passes + 1} tokens" in page.locator(".plain-count").inner_text()
        assert f"{len(said['rounds'])} pass" in page.locator(".drafted-count").inner_text()
        page.click(".first")
        assert tokens(page, ".drafted-text") == [said["start"]]


@pytest.mark.parametrize("name", ["report", "watch", "training"])
@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1280, "light")])
def test_it_fits_the_screen_and_axe_finds_nothing_serious(
    browser: Any, pages: Path, name: str, width: int, theme: str
) -> None:
    with Opened(browser, pages / f"{name}.html", width, theme) as page:
        for _ in range(3 if name != "training" else 0):
            page.click(".step")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=pages / f"{name}-{width}.png", full_page=True)
        found = accessibility.Axe().run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []


def test_the_theme_is_the_systems_until_it_is_switched(browser: Any, pages: Path) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    with Opened(browser, pages / "report.html") as page:
        light = page.evaluate(colour)
        page.click(".theme")
        dark = page.evaluate(colour)
        assert light != dark and page.locator(".theme").inner_text() == "Light"
        page.click(".theme")
        assert page.evaluate(colour) == light
    with Opened(browser, pages / "report.html", theme="dark") as page:
        assert page.evaluate(colour) == dark


def test_everything_is_reached_and_worked_by_keyboard(browser: Any, pages: Path) -> None:
    with Opened(browser, pages / "report.html") as page:
        reached = []
        for _ in range(60):
            page.keyboard.press("Tab")
            name = page.evaluate("document.activeElement.className || document.activeElement.tagName")
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            if name == "BODY":
                break
            assert outline != "none", name
            reached.append(name)
        assert {"skip", "theme", "which", "step", "play", "speed", "at", "stage"} <= set(reached)
        page.focus(".step")
        page.keyboard.press("Enter")
        page.keyboard.press("ArrowRight")
        assert page.locator(".at").input_value() == "2"
        page.keyboard.press("ArrowLeft")
        assert page.locator(".at").input_value() == "1"
        page.focus(".at")
        page.keyboard.press("End")
        assert page.locator(".said").inner_text().startswith("Done after")
