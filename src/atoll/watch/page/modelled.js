// What the runs would do on a given link, one machine per worker: losses against time, and how they would begin.

import { Chart } from "./chart.js";
import { element, plain, span, svg, swatch } from "./dom.js";
import { looks, lossSeries } from "./comparison.js";
import { Part } from "./part.js";
import { timeTicks } from "./ticks.js";
import { duration, known, loss, moment, share } from "./units.js";

const WIDTH = 1000; // of a lane's drawing, which is stretched to its box
const LEGEND = { training: "computing", idle: "waiting", rounds: "link busy" };
const TIMES_LONGER = 6; // from which on a logarithmic axis shows what a linear one would hide

export function modelled({ link, words, window_s, lanes, clocks }, runs) {
  const where = plain(link, 60);
  const part = new Part(`Time at ${where}, modelled`, { wide: true });
  part.say(`The same losses over the time that a run would take with one machine per worker and ${where} for each.`);
  const chart = lossOverTime(runs, clocks, where);
  if (chart) part.body.append(chart);
  const keys = Object.entries(LEGEND).map(([kind, name]) => element("li", {}, swatch(`lane ${kind}`), name));
  part.body.append(element("h3", { class: "chart-title" }, "How it would begin"),
    element("p", { class: "hint" }, plain(words, 400)), element("ul", { class: "legend plain" }, ...keys),
    element("ul", { class: "modelled" }, ...lanes.map((lane) => drawn(lane, runs, window_s))), axis(window_s));
  return part.node;
}

/** Draws losses against modelled time, on a logarithmic axis if one run takes far longer than another. */
function lossOverTime(runs, clocks, where) {
  const times = clocks.map(({ step, seconds }) => new Map(step.map((one, at) => [one, seconds[at]])));
  const isBent = farApart(times.map((time) => Math.max(0, ...time.values())).filter((end) => end > 0));
  const place = (time) => (isBent ? (time > 0 ? Math.log10(time) : null) : time ?? null);
  const series = lossSeries(runs, ({ step }, at) => step.map((one) => place(times[at]?.get(one))));
  if (!series.some(({ x, mean }) => x.some(known) && mean.some(known))) return null;
  const chart = new Chart({ label: `Loss against time at ${where}`, height: 260, value: loss, logarithmic: true });
  chart.show(series.map(withoutGaps), isBent ? "magnitude" : "seconds");
  return chart.node;
}

const farApart = (ends) => Math.max(...ends) >= TIMES_LONGER * Math.min(...ends);

/** Returns a series without the points whose time is not known. */
function withoutGaps(one) {
  const kept = (values) => values?.filter((_, at) => known(one.x[at]));
  return { ...one, x: kept(one.x), mean: kept(one.mean), notes: kept(one.notes) };
}

function drawn({ run, workers, end_s, utilisation, waits, busy }, runs, window_s) {
  const { name, colour } = looks(runs[run] ?? {}, run);
  const which = workers.length ? `, ${workers.length === 1 ? "worker" : "workers"} ${workers.join(", ")}` : "";
  const bars = (spans, y, height) => spans.filter(([begin]) => begin < window_s).map(([begin, end]) => {
    const [x, right] = [begin, Math.min(end, window_s)].map((at) => (at / window_s * WIDTH).toFixed(2));
    return `M${x} ${y}H${right}V${y + height}H${x}Z`;
  }).join("");
  const box = { viewBox: `0 0 ${WIDTH} 20`, preserveAspectRatio: "none" };
  const picture = svg("svg", { class: "picture", "aria-hidden": "true", ...box },
    svg("path", { class: `solid ${colour}`, d: bars([[0, end_s]], 0, 12) }),
    svg("path", { class: "solid idle", d: bars(waits, 0, 12) }),
    svg("path", { class: "solid cmuted", d: bars(busy, 14, 4) }));
  const said = `${share(utilisation)} computing, ${duration(end_s)} in all`;
  return element("li", {}, element("p", {}, span("", `${name}${which}`), span("amounts", said)),
    element("div", { class: "modelled-lane" }, picture));
}

function axis(window_s) {
  const { ticks, step } = timeTicks(0, window_s, 5);
  return element("p", { class: "modelled-axis", "aria-hidden": "true" }, ...ticks.map((tick) => {
    const label = span("", moment(tick, step));
    label.style.left = `${100 * tick / window_s}%`;
    return label;
  }));
}
