// A frozen page: one run or several, from an object in the page itself.

import { Chart } from "./chart.js";
import { choices, element, plain, span, swatch } from "./dom.js";
import { anchorSeries, colour } from "./loss.js";
import { Part } from "./part.js";
import { Run } from "./run.js";
import { table } from "./table.js";
import { loss } from "./units.js";

/** Returns the page of {runs, title, summary: {columns, rows}, claims}. */
export function report({ runs = [], title, summary, claims = [] }) {
  const isOne = runs.length === 1;
  const heading = element("h1", {}, plain(title || (isOne ? "One run" : `${runs.length} runs`), 200));
  const nodes = [element("header", { class: "title" }, element("p", { class: "kicker" }, "atoll report"), heading)];
  const items = claims.map((claim) => element("li", {}, plain(claim, 600)));
  if (items.length) nodes.push(element("ul", { class: "claims" }, ...items));
  if (summary?.rows?.length) nodes.push(numbers(summary));
  if (!isOne && runs.length) nodes.push(overlaid(runs));
  nodes.push(...runs.map((sections, at) => (isOne ? opened(sections) : folded(sections, at))));
  return element("main", { class: "report" }, ...nodes);
}

function numbers({ columns, rows }) {
  const part = new Part("Numbers", { wide: true });
  part.say("");
  const named = (name, at) => span("", rows.length > 1 ? swatch(`round ${colour(at)}`) : null, plain(name, 120));
  const cells = rows.map(([name, ...others], at) => [named(name, at), ...others.map((cell) => plain(cell, 200))]);
  part.body.append(table(columns.map((name) => plain(name, 80)), cells, "Numbers"));
  return part.node;
}

/** Returns the curves of all runs in one chart: held out, or the mean of the workers where nothing was evaluated. */
function overlaid(runs) {
  const part = new Part("Loss of all runs", { wide: true });
  const chart = new Chart({ label: "Loss of all runs", height: 300, value: loss, logarithmic: true });
  const draw = (along) => chart.show(runs.map((sections, at) => series(sections, along, at)), along);
  part.say("Held-out loss of the anchor, in nats per token.");
  part.controls.append(choices("Along", { tokens: "Tokens", seconds: "Time", step: "Steps" }, draw));
  part.body.append(chart.node);
  draw("tokens");
  return part.node;
}

function series({ run = {}, loss: losses = {} }, along, at) {
  const style = { colour: colour(at), style: at >= 8 ? "dashed" : "" };
  const name = plain(run.name || `run ${at + 1}`, 60);
  if (losses.anchor?.length) return anchorSeries(losses.anchor, along, name, style);
  const [first] = Object.values(losses.workers ?? {});
  return { name, ...style, x: first?.[along] ?? [], mean: first?.mean ?? [] };
}

function opened(sections) {
  const made = new Run(2, null);
  made.show(sections);
  return made.node;
}

function folded(sections, at) {
  const name = plain(sections.run?.name || `run ${at + 1}`, 120);
  const box = element("details", { class: "one-run" }, element("summary", {}, swatch(`round ${colour(at)}`), name));
  box.addEventListener("toggle", () => {
    if (box.open && box.childElementCount === 1) box.append(opened(sections));
  });
  return box;
}
