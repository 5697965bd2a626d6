// A frozen page: one run or several, from an object in the page itself.

import { Chart } from "./chart.js";
import { choices, element, plain } from "./dom.js";
import { anchorSeries, colour } from "./loss.js";
import { Part } from "./part.js";
import { Run } from "./run.js";
import { table } from "./table.js";
import { loss } from "./units.js";

/** Returns the page of {runs, title, summary: {columns, rows}, claims}. */
export function report({ runs = [], title, summary, claims = [] }) {
  const isOne = runs.length === 1;
  const nodes = [element("header", { class: "title" }, element("p", { class: "kicker" }, "atoll report"), element("h1", {}, plain(title || (isOne ? "One run" : `${runs.length} runs`), 200)))];
  if (claims.length) nodes.push(element("ul", { class: "claims" }, ...claims.map((claim) => element("li", {}, plain(claim, 600)))));
  if (summary?.rows?.length) nodes.push(numbers(summary));
  if (!isOne && runs.length) nodes.push(overlaid(runs));
  nodes.push(...runs.map((sections, at) => (isOne ? opened(sections) : folded(sections, at))));
  return element("main", { class: "report" }, ...nodes);
}

function numbers({ columns, rows }) {
  const part = new Part("Numbers", { wide: true });
  part.say("");
  const cells = rows.map((row, at) => row.map((cell, place) => (place || rows.length < 2 ? plain(cell, 200) :
    element("span", {}, element("span", { class: `key round ${colour(at)}`, "aria-hidden": "true" }), plain(cell, 120)))));
  part.body.append(table(columns.map((name) => plain(name, 80)), cells, { label: "Numbers" }));
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
  const box = element("details", { class: "one-run", ontoggle: () => {
    if (box.open && box.childElementCount === 1) box.append(opened(sections));
  } }, element("summary", {}, element("span", { class: `key round ${colour(at)}`, "aria-hidden": "true" }), plain(sections.run?.name || `run ${at + 1}`, 120)));
  return box;
}
