// A frozen page: one run or several, from an object in the page itself.

import { element, plain, swatch } from "./dom.js";
import { colour } from "./colours.js";
import { modelled } from "./modelled.js";
import { bytesSent, losses, numbers, outerGradients, sideBySide } from "./comparison.js";
import { Run } from "./run.js";

/** Returns the page of a report, as atoll.watch.report_content defines it; what is left out is not shown. */
export function report({ runs = [], claims = [], notes = [], tables = [], ...content }) {
  const { title, lead, summary, sent, modelled: times } = content;
  const isOne = runs.length === 1;
  const heading = element("h1", {}, plain(title || (isOne ? "One run" : `${runs.length} runs`), 200));
  const nodes = [element("header", { class: "title" }, element("p", { class: "kicker" }, "atoll report"), heading)];
  if (lead) nodes.push(element("p", { class: "lead" }, plain(lead, 4000)));
  const items = claims.map((claim) => element("li", {}, plain(claim, 600)));
  if (items.length) nodes.push(element("ul", { class: "claims" }, ...items));
  nodes.push(...notes.map((note) => element("p", { class: "warning", role: "note" }, plain(note, 600))));
  if (isOne) nodes.push(opened(runs[0], 2));
  if (summary?.rows?.length) nodes.push(numbers(summary));
  if (!isOne && runs.length) nodes.push(losses(runs), ...(sent?.length ? [bytesSent(sent)] : []));
  if (times) nodes.push(modelled(times, runs));
  const outer = isOne ? null : outerGradients(runs);
  if (outer) nodes.push(outer);
  nodes.push(...tables.map(sideBySide));
  if (!isOne && runs.length) nodes.push(each(runs));
  return element("main", { class: "report" }, ...nodes);
}

function opened(sections, level) {
  const made = new Run(level, null);
  made.show(sections);
  return made.node;
}

function each(runs) {
  const heading = element("h2", {}, "Each run");
  return element("section", { class: "part wide" }, heading, ...runs.map(folded));
}

function folded(sections, at) {
  const name = plain(sections.run?.name || `run ${at + 1}`, 120);
  const box = element("details", { class: "one-run" }, element("summary", {}, swatch(`round ${colour(at)}`), name));
  box.addEventListener("toggle", () => {
    if (box.open && box.childElementCount === 1) box.append(opened(sections, 3));
  });
  return box;
}
