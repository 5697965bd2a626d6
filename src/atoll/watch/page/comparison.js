// Compares runs on a frozen page: numbers, bytes, curves of all runs in one chart, and tables of facts.

import { Chart } from "./chart.js";
import { colour } from "./colours.js";
import { byPeriod } from "./curves.js";
import { choices, element, plain, span, swatch } from "./dom.js";
import { anchorSeries } from "./loss.js";
import { Part } from "./part.js";
import { table } from "./table.js";
import { cosine, known, loss, mean, small } from "./units.js";

const STYLES = ["", "dashed", "dotted", "dash-dotted"]; // a curve shows through the gaps of the one above it

/** Returns the name, the colour and the dashes of a run by its place. */
export function looks({ run }, at) {
  return { name: plain(run?.name || `run ${at + 1}`, 60), colour: colour(at), style: STYLES[at % STYLES.length] };
}

export function numbers({ columns, rows, tags = [], words = "" }) {
  const part = new Part("Numbers", { wide: true });
  part.say("");
  const named = (name, at) => span("named", rows.length > 1 ? swatch(`round ${colour(at)}`) : null,
    span("", plain(name, 120), tags[at] ? span("note", plain(tags[at], 120)) : null));
  const cells = rows.map(([name, ...others], at) => [named(name, at), ...others.map((cell) => plain(cell, 200))]);
  part.body.append(table(columns.map((name) => plain(name, 80)), cells, "Numbers"));
  if (words) part.body.append(element("p", { class: "hint" }, plain(words, 2000)));
  return part.node;
}

/** Draws the bytes that a worker sends in each run on one linear scale; `run` is null for one that never was. */
export function bytesSent(sent) {
  const part = new Part("Bytes sent per worker", { wide: true });
  part.say("Payloads that one worker handed to its link over the run, each counted once.");
  const most = Math.max(1, ...sent.map((one) => one.sent_bytes));
  part.body.append(element("ul", { class: "sent" }, ...sent.map(({ name, run, sent_bytes, words }) => {
    const bar = element("i", { class: known(run) ? colour(run) : "cmuted" });
    bar.style.width = `${sent_bytes > 0 ? Math.max(0.2, 100 * sent_bytes / most) : 0}%`;
    return element("li", {}, element("p", {}, span("", plain(name, 120)), span("amounts", plain(words, 120))),
      element("span", { class: "track", "aria-hidden": "true" }, bar));
  })));
  return part.node;
}

export function losses(runs) {
  const part = new Part("Loss of all runs", { wide: true });
  const chart = new Chart({ label: "Loss of all runs", height: 300, value: loss, logarithmic: true });
  const draw = (along) => chart.show(lossSeries(runs, (curve) => curve[along], along), along);
  part.say("Held-out loss of the anchor, in nats per token; faint: loss in training. A name hides its curve.");
  part.controls.append(choices("Along", { tokens: "Tokens", seconds: "Time", step: "Steps" }, draw));
  part.body.append(chart.node);
  draw("tokens");
  return part.node;
}

/** Returns the held-out losses of all runs and, faint, those in training; `place` finds the x of a curve. */
export function lossSeries(runs, place, along = "step") {
  const faint = runs.map((sections, at) => {
    const curve = trained(Object.values(sections.loss?.workers ?? {}));
    const { name, colour: tint } = looks(sections, at);
    const style = { colour: tint, style: "faint", group: "training" };
    return { name: `${name}, training`, ...style, x: place(curve, at), mean: curve.mean };
  });
  const held = runs.map((sections, at) => {
    const { name, ...style } = looks(sections, at);
    const made = anchorSeries(sections.loss?.anchor ?? [], along, name, style);
    return along === "step" ? { ...made, x: place({ step: made.x }, at) } : made;
  });
  return [...held, ...faint];
}

/** Returns the mean over workers, or the loss of the first where they were not logged at the same steps. */
function trained(workers) {
  const [first, ...others] = workers;
  if (!first) return { step: [], tokens: [], seconds: [], mean: [] };
  const alike = others.every(({ step }) => step.length === first.step.length && step.at(-1) === first.step.at(-1));
  if (!alike) return first;
  return { ...first, mean: first.mean.map((_, at) => mean(workers.map((one) => one.mean[at]))) };
}

/** Draws the outer gradients of all runs; null if none has any. */
export function outerGradients(runs) {
  const found = runs.map(({ outer, run }) => outer && byPeriod(outer, run?.period));
  const series = (key) => found.map((outer, at) =>
    ({ ...looks(runs[at], at), x: outer?.step ?? [], mean: outer?.[key]?.mean ?? [] }));
  if (!series("norm").some((one) => one.mean.some(known))) return null;
  const part = new Part("Outer gradients of all runs", { wide: true });
  part.say("Norm of a fragment's mean delta, and how much workers agree (1: the same direction, 0: unrelated).");
  const chart = (label, key, options) => {
    const made = new Chart({ label, height: 190, ...options });
    made.show(series(key));
    return element("div", {}, element("h3", { class: "chart-title" }, label), made.node);
  };
  part.body.append(element("div", { class: "halves" },
    chart("Norm of the mean delta", "norm", { value: small, range: [0, null] }),
    chart("Cosine between workers", "cosine", { value: cosine })));
  return part.node;
}

/** Returns texts of the runs side by side; what all have in common is said once. */
export function sideBySide({ title, words, columns, rows }) {
  const part = new Part(plain(title, 80), { wide: true });
  part.say(plain(words, 400));
  const isSeveral = columns.length > 2;
  const names = columns.slice(1).map((name, at) =>
    element("th", { scope: "col" }, span("named", isSeveral ? swatch(`round ${colour(at)}`) : null, plain(name, 48))));
  const lines = rows.map(([label, ...cells]) => {
    const isCommon = isSeveral && cells.every((cell) => cell === cells[0]);
    const shown = isCommon ? [element("td", { class: "common", colspan: String(cells.length) }, text(cells[0]))] :
      cells.map((cell) => element("td", {}, text(cell)));
    return element("tr", {}, element("th", { scope: "row" }, plain(label, 120)), ...shown);
  });
  const head = element("thead", { class: isSeveral ? "" : "unseen" }, element("tr", {}, element("td"), ...names));
  const made = element("table", { class: "side" }, head, element("tbody", {}, ...lines));
  const label = plain(title, 80);
  part.body.append(element("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, made));
  return part.node;
}

/** Returns a text whose lines break at spaces, and inside a word, as at the hyphens of an option, only if they must. */
const text = (cell) => element("bdi", {}, ...plain(cell, 1000).split(/(\s+)/).map((part) =>
  (part.trim() ? span("word", part) : part)));
