"""The page of `atoll watch`: what it shows, how it follows and zooms, and that text stays text."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_page_files.py"]

_PAGE = "tests/browser/test_page.py"
_FROZEN = "tests/browser/test_frozen.py"
_CONTROLS = ("tests/browser/test_hostile_text.py::test_live",)
_FIRST = (f"{_PAGE}::test_the_first_screen_answers_the_first_questions",)
_FOLLOWS = (f"{_PAGE}::test_it_follows_what_changes",)
_KEYS = (f"{_PAGE}::test_zoom_by_keyboard_and_buttons",)
_MOUSE = (f"{_PAGE}::test_zoom_by_mouse_and_wheel_asks_for_detail",)
_LOST = (f"{_PAGE}::test_it_says_since_when_it_is_disconnected_and_connects_again",)

MUTANTS = [
    Mutant(
        "the page reads text as markup",
        "watch/page/dom.js",
        "if (node.textContent !== shown) node.textContent = shown;",
        "if (node.textContent !== shown) node.innerHTML = shown;",
    ),
    Mutant(
        "control characters reach the page",
        "watch/page/dom.js",
        'const clean = (text) => text.toWellFormed().replace(CONTROLS, "\\ufffd");',
        "const clean = (text) => text.toWellFormed();",
        tests=_CONTROLS,
    ),
    Mutant(
        "states are looked up among what every object has",
        "watch/page/state.js",
        'STATES.get(about.state) ?? [plain(about.state ?? "Connecting", 40), "waits"]',
        "({ training: ['Training', 'good'] })[about.state] ?? [plain(about.state, 40), 'waits']",
        tests=_CONTROLS,
    ),
    Mutant(
        "content of a frozen page can end its script",
        "watch/serialise.py",
        'in "<>&\\u2028\\u2029"',
        'in ">&\\u2028\\u2029"',
    ),
    Mutant(
        "the policy of a frozen page allows another script",
        "watch/frozen.py",
        "hashlib.sha256(text.encode())",
        "hashlib.sha256(text.strip().encode())",
    ),
    Mutant(
        "a colour of the page is not the report's", "watch/page/style.css", "--run-1: #d55e00;", "--run-1: #ff0000;"
    ),
    Mutant(
        "a worker that is away counts as there",
        "watch/page/state.js",
        'seats.filter(({ kind }) => kind === "away" || kind === "gone")',
        'seats.filter(({ kind }) => kind === "gone")',
        tests=_FIRST,
    ),
    Mutant(
        "time left is shown without its minutes",
        "watch/page/units.js",
        "${two(Math.round(whole / 60) % 60)}${GAP}min`",
        "${two(Math.round(whole / 60) % 10)}${GAP}min`",
        tests=(f"{_PAGE}::test_units",),
    ),
    Mutant(
        "new faults are not shown",
        "watch/page/run.js",
        'faults: ["faults", "run"],',
        'faults: ["run"],',
        tests=_FOLLOWS,
    ),
    Mutant(
        "a worker that is away counts for the training loss and has a rate",
        "watch/page/state.js",
        "return Boolean(last) && (last === lane.spans.at(-1) ||",
        "return Boolean(last) && (last ||",
        tests=(f"{_PAGE}::test_a_worker_that_is_away_counts_neither_for_the_loss_nor_for_the_rate",),
    ),
    Mutant(
        "a run that goes on is said to write no samples",
        "watch/page/lists.js",
        "isAwaited: !isOff && !isOver(run)",
        "isAwaited: false",
        tests=(f"{_PAGE}::test_what_is_not_there_yet_has_a_reason",),
    ),
    Mutant(
        "a report speaks of an ended run as if it went on",
        "watch/page/state.js",
        '["finished", "interrupted", "failed"].includes(run?.state)',
        'run?.state === "finished"',
        tests=(f"{_FROZEN}::test_the_words_of_an_ended_run",),
    ),
    Mutant(
        "a mean speed is not called so",
        "watch/page/state.js",
        'this.isOver ? "tokens a second, mean" : "tokens a second"',
        '"tokens a second"',
        tests=(f"{_FROZEN}::test_the_words_of_an_ended_run",),
    ),
    Mutant(
        "the sentence about an ended run's speed has its last reading",
        "watch/page/curves.js",
        "isOver(run) ? run[key] : newest(key)",
        "newest(key)",
        tests=(f"{_FROZEN}::test_the_words_of_an_ended_run",),
    ),
    Mutant(
        "the list of faults scrolls in a report",
        "watch/page/lists.js",
        "if (!this.isServed) return [list];",
        "",
        tests=(f"{_FROZEN}::test_the_words_of_an_ended_run",),
    ),
    Mutant(
        "nothing hints that a box scrolls",
        "watch/page/style.css",
        "linear-gradient(-90deg, var(--shade), transparent) right / 1rem 100%",
        "linear-gradient(transparent, transparent) right / 1rem 100%",
        tests=(f"{_FROZEN}::test_a_wide_table_hints_at_its_edge_that_it_scrolls",),
    ),
    Mutant(
        "a single point has many ticks",
        "watch/page/chart.js",
        "const along = isPoint ?",
        "const along = false ?",
        tests=(f"{_PAGE}::test_one_point_has_one_tick",),
    ),
    Mutant(
        "a page that has lost its server says that it is live",
        "watch/page/connection.js",
        "this.#say(this.lostAt ?? Date.now() / 1000, isRefused);",
        "this.#say(null);",
        tests=_LOST,
    ),
    Mutant(
        "a sample does not say what it continues",
        "watch/page/lists.js",
        "plain(prompt, 4000)",
        '""',
        tests=(f"{_PAGE}::test_the_first_screen_answers_the_first_questions",),
    ),
    Mutant(
        "a page that was refused does not say so",
        "watch/page/connection.js",
        "if (!isRefused) return",
        "return",
        tests=(f"{_PAGE}::test_it_comes_back_after_the_server_has_refused_it",),
    ),
    Mutant(
        "a page that was refused never asks again",
        "watch/page/connection.js",
        "setTimeout(() => this.#open(), AGAIN_MS);",
        "return;",
        tests=(f"{_PAGE}::test_it_comes_back_after_the_server_has_refused_it",),
    ),
    Mutant(
        "the last minute moves though motion is unwanted",
        "watch/page/live_lanes.js",
        'matchMedia("(prefers-reduced-motion: reduce)")',
        'matchMedia("(prefers-reduced-motion: any)")',
        tests=(f"{_PAGE}::test_the_last_minute_moves_unless_motion_is_unwanted",),
    ),
    Mutant(
        "zooming in shows more",
        "watch/page/zoom.js",
        "(this.to - this.from) / factor)",
        "(this.to - this.from) * factor)",
        tests=_KEYS,
    ),
    Mutant(
        "a zoomed window leaves the run",
        "watch/page/zoom.js",
        "Math.min(Math.max(0, from), this.end - width)",
        "from",
        tests=_KEYS,
    ),
    Mutant(
        "a zoomed window stays coarse",
        "watch/page/run_lanes.js",
        "if (!this.detail || this.isAsking",
        "if (this.detail || this.isAsking",
        tests=_MOUSE,
    ),
    Mutant(
        "curves are cut off at the top",
        "watch/page/chart.js",
        "this.range?.[1] ?? high + slack",
        "this.range?.[1] ?? high - 3 * slack",
        tests=(f"{_PAGE}::test_no_curve_is_cut_off",),
    ),
    Mutant(
        "a hidden curve is drawn",
        "watch/page/chart.js",
        "if (!this.hidden.delete(name)) this.hidden.add(name);",
        "this.hidden.delete(name);",
        tests=(f"{_PAGE}::test_curves_can_be_hidden_and_drawn_against_something_else",),
    ),
    Mutant(
        "the keyboard reads the same value for ever",
        "watch/page/chart.js",
        "nearest(x, this.cursor) + KEYS[event.key]",
        "nearest(x, this.cursor)",
        tests=(f"{_PAGE}::test_values_under_a_pointer_and_by_keyboard",),
    ),
    Mutant(
        "the bytes of data-parallel are drawn on a scale of their own",
        "watch/page/traffic.js",
        'amount("data-parallel", whole, most, "cmuted")',
        'amount("data-parallel", whole, whole / 2, "cmuted")',
        tests=(f"{_PAGE}::test_bytes_are_compared_on_a_linear_scale",),
    ),
    Mutant(
        "a frozen page opens a connection",
        "watch/page/app.js",
        "if (frozen) {",
        "new Connection(() => {});\nif (frozen) {",
        tests=("tests/browser/test_frozen.py::test_one_run",),
    ),
]
