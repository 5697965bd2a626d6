"""The page in a real browser: what it shows, that it follows, fits, zooms and can be read by all."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from browser.conftest import serious_faults
from page_content import sections, window
from page_server import PageServer

Visit = Callable[..., Any]
SIDEWAYS = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(sections()) as server:
        yield server


def text(page: Any, selector: str) -> str:
    return str(page.locator(selector).first.inner_text()).replace("\u00a0", " ")


def wait_for(page: Any, selector: str, wanted: str) -> None:
    """Waits until an element's text matches a regular expression."""
    page.wait_for_function(
        "([selector, wanted]) => [...document.querySelectorAll(selector)]"
        ".some((one) => new RegExp(wanted).test(one.innerText.replaceAll('\\u00a0', ' ')))",
        arg=[selector, wanted],
    )


def section(page: Any, title: str) -> Any:
    return page.get_by_role("region", name=title, exact=True)


# ---------------------------------------------------------------------- what it shows


def test_the_first_screen_answers_the_first_questions(server: PageServer, visit: Visit) -> None:
    page = visit(server.url)
    wait_for(page, "h1", "four-sites")
    assert text(page, "[role=status]") == "Training"
    figures = text(page, ".figures")
    for wanted in ("2 h 05 min", "3.2", "anchor of step 17,940", "3 of 4", "without 3", "28 k", "93 %"):
        assert wanted in figures
    assert [chip.split("\n")[-1] for chip in page.locator(".chip").all_inner_texts()][:3] == ["training"] * 3
    assert "away 2 min 10 s" in text(page, ".chip.away")
    assert page.locator(".chips").bounding_box()["y"] < 800
    assert text(page, ".sample blockquote").startswith("It was evening. The harbour was quiet")
    scores = section(page, "Scores of tasks").locator("th, td").all_text_contents()
    assert scores == ["task", "documents", "accuracy", "chance", "arc_easy", "2,376", "43.20 ± 0.98 %", "25.0 %"]


def test_no_part_of_an_empty_run_is_an_error(visit: Visit) -> None:
    with PageServer({}) as server:
        page = visit(server.url)
        server.send({"run": {"name": "soon", "state": "waiting to begin", "workers": 2, "steps": 100, "step": 0}})
        wait_for(page, "[role=status]", "Waiting to begin")
        for name in ("loss", "lanes", "now", "traffic", "speed", "outer", "faults", "samples", "settings", "scores"):
            server.send({name: None})
        empty = {"loss": {"anchor": [], "workers": {}}, "lanes": {"end_s": 0, "workers": [], "views": []}}
        server.send(
            empty
            | {"outer": {"fragments": 0, "step": [], "norm": {}, "cosine": {}}, "faults": {"count": 0, "latest": []}}
        )
        wait_for(page, ".part", "No worker has begun yet")
        wait_for(page, ".part", "None so far")
        assert page.evaluate(SIDEWAYS) == 0


def test_what_is_not_there_yet_has_a_reason(visit: Visit) -> None:
    with PageServer(sections() | {"samples": [], "settings": []}) as server:
        page = visit(server.url)
        wait_for(page, ".summary", "No sample of text is there yet: one comes with each evaluation")
        wait_for(page, ".summary", "not known here: they are in the run file on the workers' machines")
        server.send({"settings": [["log.sample", "0"]]})
        wait_for(page, ".summary", "This run writes no samples of text")
        server.send({"settings": [["log.sample", "64"]]})
        wait_for(page, ".summary", "No sample of text is there yet")
        server.send({"run": sections(state="interrupted")["run"]})
        wait_for(page, ".summary", "This run writes no samples of text")


def test_one_point_has_one_tick(visit: Visit) -> None:
    content = sections(workers=1)
    content["loss"] = {"anchor": [[100, 2050.0, 40.0, 3.5, 100, True]], "workers": {}}
    with PageServer(content) as server:
        page = visit(server.url)
        loss = section(page, "Loss")
        for along, wanted in (("Tokens", "2.05 k"), ("Time", "40 s"), ("Steps", "100")):
            loss.get_by_role("button", name=along).click()
            ticks = loss.locator(".tick:not([dy])").all_text_contents()
            assert [tick.replace("\u00a0", " ") for tick in ticks] == [wanted]


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("reading", "Reading"),
        ("silent", "Silent"),
        ("finished", "Finished"),
        ("waiting for a round", "Waiting for a round"),
    ],
)
def test_states(server: PageServer, visit: Visit, state: str, word: str) -> None:
    page = visit(server.url)
    server.send({"run": sections(state=state, read=0.25, left_s=None)["run"]})
    wait_for(page, "[role=status]", f"^{word}$")
    bar = page.locator("[role=progressbar]")
    assert bar.get_attribute("aria-valuenow") == ("25" if state == "reading" else "45")
    assert ("It took" in text(page, ".figures")) == (state == "finished")


# ---------------------------------------------------------------------- it follows


def test_it_follows_what_changes(server: PageServer, visit: Visit) -> None:
    page = visit(server.url)
    wait_for(page, ".progress", "18,000 of 40,000")
    before = page.locator(".curve.cink").get_attribute("d")
    later = sections(seconds=8000)
    server.send({"run": later["run"], "loss": later["loss"]})
    wait_for(page, ".progress", "20,000 of 40,000, 50 %")
    assert page.locator(".curve.cink").get_attribute("d") != before
    fault = {"at_s": 7990.0, "step": 19_990, "worker": 1, "kind": "dropped", "words": "too late"}
    server.send({"faults": {"count": 3, "latest": [fault]}})
    wait_for(page, ".faults li", "dropped\\s+worker 1, step 19,990: too late")
    assert page.title().startswith("50 % four-sites, training")


def test_a_worker_that_is_lost_and_comes_back(server: PageServer, visit: Visit) -> None:
    page = visit(server.url)
    lanes = sections()["lanes"]
    lanes["workers"][1]["spans"] = [[0.0, 7100.0, "training"], [7100.0, 7200.0, "away"]]
    server.send({"lanes": lanes})
    wait_for(page, ".chip.away", "worker 1\\s+away 1 min 40 s")
    wait_for(page, ".figures", "2 of 4\\s+without 1, 3")
    lanes["workers"][1]["spans"][1:] = [[7100.0, 7150.0, "away"], [7150.0, 7200.0, "catching up"]]
    server.send({"lanes": lanes})
    wait_for(page, ".chip.catching-up", "worker 1\\s+catching up 50 s")


def test_a_worker_that_is_away_counts_neither_for_the_loss_nor_for_the_rate(server: PageServer, visit: Visit) -> None:
    page = visit(server.url)
    wait_for(page, ".summary", r"In training, worker 0 \(3\.\d+\) has the lowest loss and worker 2 \(")
    content = sections()
    losses = [one["mean"][-1] for one in content["loss"]["workers"].values()]
    server.send({"loss": content["loss"] | {"anchor": []}})
    wait_for(page, ".figures", rf"Training loss\s+{sum(losses[:3]) / 3:.3f}\s+mean of the workers")
    traffic = section(page, "Traffic")
    rates = [row.split("\t")[3].replace("\u00a0", " ") for row in traffic.locator("tbody tr").all_inner_texts()]
    assert rates == ["7.90 MB/s"] * 3 + ["\u2013"]
    pairs = [line.replace("\u00a0", " ") for line in traffic.locator(".pairs li").all_inner_texts()]
    assert all(("2.40 MB/s" in line) != ("3" in line.split("\n")[0]) for line in pairs)
    lanes = content["lanes"]
    for lane in lanes["workers"]:
        lane["spans"] = [[0.0, 7100.0, "training"], [7100.0, 7200.0, "away"]]
    server.send({"lanes": lanes})
    wait_for(page, ".figures", rf"Training loss\s+{sum(losses) / 4:.3f}\s+mean of the workers")
    assert "MB/s" not in "".join(row.split("\t")[3] for row in traffic.locator("tbody tr").all_inner_texts())
    server.send({"lanes": sections()["lanes"], "run": content["run"] | {"state": "silent"}})
    wait_for(page, "[role=status]", "Silent")
    assert "MB/s" not in "".join(row.split("\t")[3] for row in traffic.locator("tbody tr").all_inner_texts())


def test_it_says_since_when_it_is_disconnected_and_connects_again(visit: Visit) -> None:
    with PageServer(sections()) as server:
        page = visit(server.url)
        wait_for(page, ".connection", "^live$")
        page.allowed_errors = True
        port = server.server_address[1]
    wait_for(page, ".connection", r"^disconnected since \d\d:\d\d:\d\d, connecting again$")
    said = text(page, ".connection")
    with PageServer(sections(name="back again"), port) as server:
        wait_for(page, "h1", "back again")
        wait_for(page, ".connection", "^live$")
    assert re.search(r"\d\d:\d\d:\d\d", said)


def test_it_comes_back_after_the_server_has_refused_it(server: PageServer, visit: Visit) -> None:
    server.is_full = True
    page = visit(server.url, refused=True)
    wait_for(
        page, ".connection", r"^refused since \d\d:\d\d:\d\d \(too many viewers, or another token\): open the address"
    )
    server.is_full = False
    wait_for(page, "h1", "four-sites")


@pytest.mark.parametrize("still", [True, False])
def test_the_last_minute_moves_unless_motion_is_unwanted(server: PageServer, visit: Visit, still: bool) -> None:
    page = visit(server.url, still=still)
    wait_for(page, "h3", "The last minute")
    page.locator(".lanes canvas").first.scroll_into_view_if_needed()
    picture = "() => document.querySelector('.lanes canvas').toDataURL()"
    server.send({"now": window(4, 7141, 7201)})
    page.wait_for_function("() => document.querySelector('.lanes canvas').width > 300")
    page.wait_for_timeout(200)
    before = page.evaluate(picture)
    if still:
        page.wait_for_timeout(500)
        assert page.evaluate(picture) == before
    else:
        page.wait_for_function(f"(before) => ({picture})() !== before", arg=before)


# ---------------------------------------------------------------------- for all eyes, ears and hands


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_is_accessible(server: PageServer, visit: Visit, width: int, dark: bool) -> None:
    page = visit(server.url, width=width, dark=dark)
    wait_for(page, "h1", "four-sites")
    for fold in page.locator("details").all():
        fold.locator("summary").first.click()
    wait_for(page, ".folded table", "18,000")
    assert page.evaluate(SIDEWAYS) == 0
    assert serious_faults(page) == []
    paper = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(21, 24, 27)" if dark else "rgb(255, 255, 255)")


def test_a_long_list_of_faults_hints_that_it_scrolls_and_does_so_by_keyboard(server: PageServer, visit: Visit) -> None:
    page = visit(server.url)
    fault = {"at_s": 7990.0, "step": 19_990, "worker": 1, "kind": "dropped", "words": "too late"}
    server.send({"faults": {"count": 60, "latest": [fault] * 60}})
    wait_for(page, ".summary", "60 so far")
    box = page.get_by_role("region", name="List of faults")
    box.scroll_into_view_if_needed()
    box.locator("ul").evaluate("(list) => { list.style.visibility = 'hidden'; }")  # the shade alone is left
    box.focus()
    page.keyboard.press("End")
    page.wait_for_function("() => document.querySelector('.tall').scrollTop > 100")
    whole = box.bounding_box()
    for scrolled, edge in ((0, whole["y"] + whole["height"] - 6), (99_999, whole["y"])):
        clip = {"x": whole["x"] + 20, "y": edge, "width": 40, "height": 6}
        box.evaluate("(box, place) => { box.scrollTop = place; box.style.background = ''; box.blur(); }", scrolled)
        shaded = page.screenshot(clip=clip)
        box.evaluate("(box) => { box.style.background = 'none'; }")
        assert page.screenshot(clip=clip) != shaded


@pytest.mark.parametrize("width", [360, 1280])
def test_no_text_of_a_chart_lies_over_another(server: PageServer, visit: Visit, width: int) -> None:
    page = visit(server.url, width=width)
    wait_for(page, "h1", "four-sites")
    page.wait_for_selector(".tick")
    over = page.evaluate("""() => [...document.querySelectorAll('.picture')].flatMap((picture) => {
        const boxes = [...picture.querySelectorAll('.tick')]
            .map((tick) => [tick.textContent, tick.getBoundingClientRect()]);
        const isOver = (one, two) => one.left < two.right && two.left < one.right
            && one.top + 2 < two.bottom && two.top + 2 < one.bottom;
        return boxes.flatMap(([a, one], at) =>
            boxes.slice(at + 1).filter(([, two]) => isOver(one, two)).map(([b]) => [a, b]));
    })""")
    assert over == []


@pytest.mark.parametrize("width", [360, 1280])
def test_no_curve_is_cut_off(server: PageServer, visit: Visit, width: int) -> None:
    page = visit(server.url, width=width)
    page.wait_for_selector(".curve", state="attached")
    outside = page.evaluate("""() => [...document.querySelectorAll('.picture')].filter((picture) => {
        const [, , width, height] = picture.getAttribute('viewBox').split(' ').map(Number);
        return [...picture.querySelectorAll('.curve, .band')].map((one) => one.getBBox()).some((box) =>
            box.x < 0 || box.y < 0 || box.x + box.width > width || box.y + box.height > height - 20);
    }).length""")
    assert outside == 0
    assert page.locator(".band").count() >= 6


def test_bytes_are_compared_on_a_linear_scale(server: PageServer, visit: Visit) -> None:
    page = visit(server.url)
    wait_for(page, ".amount", "1.87 TB")
    widths = [bar.evaluate("(bar) => parseFloat(bar.style.width)") for bar in page.locator(".amount i").all()]
    assert widths == [pytest.approx(0.3), pytest.approx(100)]  # 0.3 is the least that can be seen
    assert "603 times fewer than data-parallel" in section(page, "Traffic").inner_text()
    used = page.locator(".pairs li").nth(4).locator("i").evaluate("(bar) => parseFloat(bar.style.width)")
    assert used == pytest.approx(100 * 2.4 / 12.5, abs=0.01)


UNITS: dict[str, list[tuple[float | None, str]]] = {
    "bytes": [(999, "999 B"), (1_234_567, "1.23 MB"), (9.3e9, "9.30 GB"), (None, "\u2013")],
    "rate": [(3.4e6, "3.40 MB/s")],
    "short": [(12, "12"), (213_504, "214 k"), (999_600, "1 M")],
    "share": [(0.704, "70 %"), (0.998, "99.8 %"), (0.001, "<1 %"), (1, "100 %")],
    "duration": [
        (0.34, "340 ms"),
        (3.21, "3.2 s"),
        (59.97, "1 min 00 s"),
        (3599.7, "1 h 00 min"),
        (5400, "1 h 30 min"),
        (7512, "2 h 05 min"),
    ],
    "small": [(0.0003, "0.0003"), (3e-7, "3e-7"), (2.5e-5, "2.5e-5")],
}


def test_units(server: PageServer, visit: Visit) -> None:
    page = visit(server.url)
    shown = page.evaluate(
        "async (cases) => { const units = await import(new URL('units.js', location.href)); return Object.fromEntries("
        "Object.entries(cases).map(([name, pairs]) => [name, pairs.map(([value]) => units[name](value))])); }",
        UNITS,
    )
    said = {name: [text.replace("\u00a0", " ") for text in texts] for name, texts in shown.items()}
    assert said == {name: [text for _, text in pairs] for name, pairs in UNITS.items()}


def test_values_under_a_pointer_and_by_keyboard(server: PageServer, visit: Visit) -> None:
    page = visit(server.url)
    plot = section(page, "Loss").get_by_role("slider")
    plot.hover(position={"x": 600, "y": 100})
    words = r"tokens\s+anchor, held out\s+\d\.\d\d\d \(anchor of step [\d,]+\)\s+worker 0\s+\d\.\d\d\d"
    wait_for(page, ".readout", words)
    page.mouse.move(5, 5)
    plot.focus()
    plot.press("End")
    first = plot.get_attribute("aria-valuetext")
    plot.press("ArrowLeft")
    second = plot.get_attribute("aria-valuetext")
    assert first != second and "worker 0 3." in str(second)
    assert page.locator("[aria-live], [role=status], [role=alert], output").count() == 1


def test_curves_can_be_hidden_and_drawn_against_something_else(server: PageServer, visit: Visit) -> None:
    page = visit(server.url)
    loss = section(page, "Loss")
    loss.locator(".curve").nth(4).wait_for(state="attached")
    assert loss.locator(".curve").count() == 5
    loss.get_by_role("button", name="worker 1").click()
    assert loss.locator(".curve.c1").count() == 0 and loss.locator(".curve").count() == 4
    ticks = {}
    for along in ("Tokens", "Time", "Steps"):
        loss.get_by_role("button", name=along).click()
        ticks[along] = loss.locator(".tick").last.text_content().replace("\u00a0", " ")
    assert ticks["Tokens"].endswith("M") and ticks["Time"].startswith("2 h") and ticks["Steps"].endswith("k")
    loss.get_by_role("button", name="Last quarter").click()
    labels = loss.locator(".tick[text-anchor=end]").all_text_contents()
    assert max(float(label) for label in labels if "k" not in label) < 5


# ---------------------------------------------------------------------- zoom


def lanes_of(page: Any) -> Any:
    wait_for(page, ".hint", "Drag over a part")
    wait_for(page, ".part", "3 settings")  # all parts are there: the page grows no more
    lanes = page.locator(".zooms")
    lanes.scroll_into_view_if_needed()
    return lanes


def test_zoom_by_keyboard_and_buttons(server: PageServer, visit: Visit) -> None:
    page = visit(server.url)
    lanes = lanes_of(page)
    lanes.focus()
    for key in "++":
        lanes.press(key)
    wait_for(page, ".hint", "46 min 53 s from 36 min 34 s on")
    lanes.press("ArrowRight")
    wait_for(page, ".hint", "46 min 53 s from 45 min 56 s on")
    lanes.press("-")
    lanes.press("0")
    wait_for(page, ".hint", "Drag over a part")
    page.get_by_role("button", name="Zoom in").click()
    wait_for(page, ".hint", "1 h 00 min from 30 min 00 s on")
    page.get_by_role("button", name="Earlier").click()
    wait_for(page, ".hint", "1 h 00 min from 0 s on")
    for _ in range(4):
        page.get_by_role("button", name="Later").click()
    wait_for(page, ".hint", "1 h 00 min from 1 h 00 min on")
    page.get_by_role("button", name="The whole run").click()
    wait_for(page, ".hint", "Drag over a part")


def test_zoom_by_mouse_and_wheel_asks_for_detail(server: PageServer, visit: Visit) -> None:
    page = visit(server.url)
    lanes = lanes_of(page)
    box = lanes.bounding_box()
    page.mouse.move(box["x"] + 400, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 460, box["y"] + 20, steps=4)
    page.mouse.up()
    wait_for(page, ".hint", r"^6 min \d\d s from 3\d min")
    page.wait_for_function("() => performance.getEntriesByType('resource').some((one) => one.name.includes('/lanes?'))")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    wait_for(page, ".hint", r"^1 min \d\d s from")
    page.mouse.move(box["x"] + 500, box["y"] + 24)
    wait_for(page, ".zooms .readout", r"after 3\d min \d\d s\s+worker 0: (training|waiting).*")
    lanes.dblclick(position={"x": 500, "y": 20})
    wait_for(page, ".hint", "Drag over a part")
    assert server.asked and all(0 <= low < high <= 7200 for low, high in server.asked)
    assert len(server.asked) < 20


def test_zoom_by_two_fingers(server: PageServer, visit: Visit) -> None:
    page = visit(server.url, width=360, touch=True)
    lanes = lanes_of(page)
    box = lanes.bounding_box()
    fingers = page.context.new_cdp_session(page)

    def touch(kind: str, *places: float) -> None:
        points = [{"x": box["x"] + x, "y": box["y"] + 30, "id": at} for at, x in enumerate(places)]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 150, 190)
    for spread in range(10, 90, 10):
        touch("touchMove", 150 - spread, 190 + spread)
    touch("touchEnd")
    wait_for(page, ".hint", r"^\d+ min \d\d s from \d+ min")


# ---------------------------------------------------------------------- many


def test_sixty_four_workers(visit: Visit) -> None:
    with PageServer(sections(workers=64)) as server:
        page = visit(server.url, width=360)
        wait_for(page, ".figures", "63 of 64")
        assert page.evaluate(SIDEWAYS) == 0
        loss = section(page, "Loss")
        assert loss.locator(".curve").count() == 65 and loss.locator(".legend li").count() == 2
        assert "12 busiest of 4,032 pairs" in section(page, "Traffic").inner_text()
