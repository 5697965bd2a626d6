// Draws curves with bands as SVG, names them in a legend, and shows their values to pointers, fingers and keys.

import { element, plain, putBeside, span, svg, swatch } from "./dom.js";
import { decimals, logTicks, magnitudeTicks, roundTicks, timeTicks } from "./ticks.js";
import { count, duration, known, moment, NONE, short } from "./units.js";

const MOST_NAMED = 9;
const ARROWS = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1 };
const KEYS = { ...ARROWS, PageUp: 10, PageDown: -10, Home: -1e9, End: 1e9 };

/** The ways to measure along x: how ticks are chosen, and how a tick and a value read. */
export const ALONG = {
  step: { ticks: roundTicks, tick: (x) => short(x), value: (x) => `step ${count(Math.round(x))}` },
  tokens: { ticks: roundTicks, tick: (x) => short(x), value: (x) => `${short(x)} tokens` },
  seconds: { ticks: timeTicks, tick: moment, value: (x) => `after ${duration(x)}` },
  /** Logarithms of seconds to base 10. */
  magnitude: { ticks: magnitudeTicks, tick: (x) => whole(10 ** x), value: (x) => `after ${duration(10 ** x)}` },
};

/**
 * Draws series: {name, colour, style, x, mean, low, high, notes, dots, group}. From x to notes they are arrays of one
 * length, null where there is no value; series of one group have one entry in the legend.
 */
export class Chart {
  constructor({ label, height = 220, value = short, range = null, legend = true, logarithmic = false }) {
    Object.assign(this, { label, height, value, range, logarithmic });
    this.series = [];
    this.along = ALONG.step;
    this.hidden = new Set(); // names of series and groups
    this.cursor = null; // a value along x
    this.picture = svg("svg", { class: "picture", "aria-hidden": "true", focusable: "false" });
    this.readout = element("div", { class: "readout", hidden: true });
    this.plot = element("div", {
      class: "plot", role: "slider", tabindex: "0", "aria-label": `${label}, value by value`,
      "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0", "aria-valuetext": "no value chosen",
      onpointermove: (event) => this.#point(event), onpointerdown: (event) => this.#point(event),
      onpointerleave: () => this.#leave(), onblur: () => this.#leave(), onkeydown: (event) => this.#key(event),
    }, this.picture, this.readout);
    this.plot.style.height = `${height}px`;
    this.legend = legend ? element("ul", { class: "legend" }) : null;
    this.node = element("figure", { class: "chart" }, this.legend, this.plot);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  /** Takes the series to draw, and what x is: a key of ALONG. */
  show(series, along = "step") {
    this.series = series.filter((one) => one.x.length);
    this.along = ALONG[along];
    if (this.legend) this.#name();
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.shown = this.series.filter((one) => !this.hidden.has(one.group || one.name));
    this.frame = this.#frame(width);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.picture.replaceChildren();
    if (!this.frame) return;
    this.#axes();
    for (const one of this.shown) this.#band(one);
    for (const one of this.shown.toReversed()) this.#curve(one); // the first lies on top
    this.marker = svg("g", { class: "marker" });
    this.picture.append(this.marker);
    this.#read();
  }

  // ---- the picture

  /** Returns the edges in pixels, the ticks of y, and how values become pixels; null if there is nothing to draw. */
  #frame(width) {
    const ends = this.shown.flatMap((one) => [one.x[0], one.x.at(-1)]).filter(known);
    const { low, high } = this.#range();
    if (!ends.length || !(low <= high)) return null;
    const isBent = this.logarithmic && low > 0;
    const ticks = (isBent ? logTicks : roundTicks)(low, high, Math.max(2, Math.floor(this.height / 48)));
    const labels = ticks.ticks.map((tick) => this.#label(tick, ticks.step));
    const left = Math.ceil(10 + 6.7 * Math.max(0, ...labels.map((label) => label.length)));
    const [from, to] = [Math.min(...ends), Math.max(...ends)];
    const [isPoint, bottom] = [to === from, this.height - 22];
    const frame = { left, right: width - 14, top: 10, bottom, from, to: isPoint ? from + 1 : to, isPoint };
    const bend = isBent ? Math.log : (value) => value;
    const [deep, tall] = [bend(low), bend(high) - bend(low)];
    const place = (x) => frame.left + (x - from) / (frame.to - from) * (frame.right - left);
    const height = (y) => frame.bottom - (bend(y) - deep) / tall * (frame.bottom - frame.top);
    return Object.assign(frame, {
      ticks: ticks.ticks.map((tick, at) => [height(tick), labels[at]]),
      toX: (x) => Number(place(x).toFixed(1)),
      toY: (y) => Number(height(y).toFixed(1)),
    });
  }

  /** Returns the least and the most that y shows: all values and a little more, unless a fixed end was given. */
  #range() {
    let [low, high] = [Infinity, -Infinity];
    for (const value of this.shown.flatMap((one) => [...one.mean, ...(one.low ?? []), ...(one.high ?? [])])) {
      if (known(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
    }
    const slack = (high - low || Math.abs(high) || 1) * 0.06;
    const least = this.logarithmic && low > 0 ? low * (low / high) ** 0.06 * 0.995 : low - slack;
    return { low: this.range?.[0] ?? least, high: this.range?.[1] ?? high + slack };
  }

  #label(tick, step) {
    if (tick === 0) return this.value(0).replace(/^0\.0+$/, "0");
    const text = this.value(tick);
    return /^-?[\d.]+$/.test(text) && step < 1000 && step >= 1e-4 ? decimals(tick, step) : text;
  }

  #axes() {
    const { left, right, bottom, from, to, isPoint, ticks, toX } = this.frame;
    for (const [y, label] of ticks) {
      this.picture.append(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        svg("text", { class: "tick", x: left - 8, y, "text-anchor": "end", dy: "0.32em" }, label));
    }
    const most = Math.max(3, Math.floor((right - left) / 84));
    const along = isPoint ? { ticks: [from], step: Math.min(1, from || 1) } : this.along.ticks(from, to, most);
    for (const tick of along.ticks) {
      const x = toX(tick);
      const [anchor, shift] = x > right - 18 ? ["end", 12] : x < left + 12 ? ["start", -8] : ["middle", 0];
      const place = { x: x + shift, y: bottom + 17, "text-anchor": anchor };
      this.picture.append(svg("text", { class: "tick", ...place }, this.along.tick(tick, along.step)));
    }
  }

  #band(one) {
    if (!one.low || !one.high) return;
    for (const run of unbroken(one.x, one.low, one.high)) {
      const above = run.map((at) => this.#at(one, one.high, at));
      const outline = [...above, ...run.toReversed().map((at) => this.#at(one, one.low, at))];
      this.picture.append(svg("path", { class: `band ${one.colour}`, d: `M${outline.join("L")}Z` }));
    }
  }

  #curve(one) {
    const paths = unbroken(one.x, one.mean).map((run) => `M${run.map((at) => this.#at(one, one.mean, at)).join("L")}`);
    this.picture.append(svg("path", { class: `curve ${one.colour} ${one.style ?? ""}`, d: paths.join("") }));
    const isSparse = one.x.length <= Math.max(24, (this.frame.right - this.frame.left) / 12);
    if (one.x.length > 1 && !(one.dots && isSparse)) return;
    this.picture.append(...[...one.x.keys()].filter((at) => known(one.mean[at])).map((at) => this.#dot(one, at, 2.6)));
  }

  #at(one, values, at) {
    return `${this.frame.toX(one.x[at])},${this.frame.toY(values[at])}`;
  }

  #dot(one, at, r) {
    const [cx, cy] = [this.frame.toX(one.x[at]), this.frame.toY(one.mean[at])];
    return svg("circle", { class: `dot ${one.colour}`, cx, cy, r });
  }

  // ---- the legend: its entries hide and show series

  #name() {
    const entries = new Map();
    for (const one of this.series) if (!entries.has(one.group || one.name)) entries.set(one.group || one.name, one);
    const named = [...entries].slice(0, MOST_NAMED + 1);
    const key = JSON.stringify(named.map(([name]) => name));
    if (key !== this.named) {
      this.named = key;
      this.legend.replaceChildren(...named.map(([name, one]) => element("li", {}, this.#entry(name, one))));
    }
    const latest = this.legend.querySelectorAll(".latest");
    named.forEach(([, one], at) => {
      latest[at].textContent = one.group ? "" : this.value(one.mean.findLast(known));
    });
  }

  #entry(name, one) {
    const button = element("button", { type: "button", "aria-pressed": String(!this.hidden.has(name)) },
      swatch(`${one.colour} ${one.style ?? ""}`), span("name", plain(name, 60)), span("latest"));
    button.addEventListener("click", () => {
      if (!this.hidden.delete(name)) this.hidden.add(name);
      button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
      this.draw();
    });
    return button;
  }

  // ---- values at a place

  #point(event) {
    if (!this.frame) return;
    const { left, right, from, to } = this.frame;
    const place = (event.clientX - this.plot.getBoundingClientRect().left - left) / (right - left);
    this.cursor = from + Math.min(1, Math.max(0, place)) * (to - from);
    this.#read();
  }

  #leave() {
    this.cursor = null;
    this.#read();
  }

  #key(event) {
    if (event.key === "Escape") this.#leave();
    if (!this.frame || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    const { x } = this.shown.reduce((longest, one) => (one.x.length > longest.x.length ? one : longest));
    const at = this.cursor === null ? x.length - 1 : nearest(x, this.cursor) + KEYS[event.key];
    this.cursor = x[Math.min(x.length - 1, Math.max(0, at))];
    this.#read();
  }

  /** Shows the values at the cursor beside it, and tells them to a screen reader. */
  #read() {
    this.marker?.replaceChildren();
    this.readout.hidden = this.cursor === null || !this.frame;
    if (this.readout.hidden) return;
    const found = this.shown.map((one) => [one, nearest(one.x, this.cursor)]);
    const xs = found.map(([one, at]) => one.x[at]);
    const x = xs.reduce((best, next) => (Math.abs(next - this.cursor) < Math.abs(best - this.cursor) ? next : best));
    const { from, to, top, bottom, toX } = this.frame;
    const dots = found.filter(([one, at]) => known(one.mean[at])).map(([one, at]) => this.#dot(one, at, 3.5));
    this.marker.append(svg("line", { x1: toX(x), x2: toX(x), y1: top, y2: bottom }), ...dots);
    const lines = found.slice(0, MOST_NAMED).map(([one, at]) => [one, plain(one.name, 28), this.#words(one, at)]);
    const rows = lines.map(([one, name, words]) =>
      element("p", {}, swatch(`${one.colour} ${one.style ?? ""}`), span("name", name), element("b", {}, words)));
    if (found.length > MOST_NAMED) rows.push(element("p", {}, `and ${found.length - MOST_NAMED} more`));
    const title = this.along.value(x);
    this.readout.replaceChildren(element("p", { class: "title" }, title), ...rows);
    putBeside(this.readout, toX(x));
    const text = `${title}: ${lines.map(([, name, words]) => `${name} ${words}`).join(", ")}`;
    const told = { min: from, max: to, now: x, text };
    for (const [key, value] of Object.entries(told)) this.plot.setAttribute(`aria-value${key}`, String(value));
  }

  #words(one, at) {
    const value = this.value(one.mean[at]);
    return value !== NONE && one.notes?.[at] ? `${value} (${one.notes[at]})` : value;
  }
}

/** Returns the indices at which all of these arrays hold numbers, cut where they do not. */
function unbroken(...arrays) {
  const found = [];
  let open = null;
  for (let at = 0; at < arrays[0].length; at += 1) {
    if (!arrays.every((values) => known(values[at]))) open = null;
    else if (open) open.push(at);
    else found.push((open = [at]));
  }
  return found;
}

/** A round number of a unit of time. */
function whole(seconds) {
  const round = Number(seconds.toPrecision(3));
  return moment(round, round);
}

/** Returns the index of the value that is nearest in an ascending array. */
function nearest(values, wanted) {
  let [low, high] = [0, values.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - values[low] < values[high] - wanted ? low : high;
}
