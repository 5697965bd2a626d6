// Draws curves with bands as SVG, names them in a legend, and shows their values under a pointer, a finger or the keyboard.

import { element, plain, svg } from "./dom.js";
import { decimals, logTicks, roundTicks, timeTicks } from "./ticks.js";
import { duration, known, moment, NONE, short } from "./units.js";

const MOST_NAMED = 9;

/** The ways to measure along x: how ticks are chosen, and how a tick and a value read. */
export const ALONG = {
  step: { name: "step", ticks: roundTicks, tick: (x) => short(x), value: (x) => `step ${Math.round(x).toLocaleString("en-US")}` },
  tokens: { name: "tokens", ticks: roundTicks, tick: (x) => short(x), value: (x) => `${short(x)} tokens` },
  seconds: { name: "time", ticks: timeTicks, tick: moment, value: (x) => `after ${duration(x)}` },
};

/** Draws series {name, colour, x, mean, low, high, dots, notes}: arrays of one length, null where there is no value. */
export class Chart {
  constructor({ label, height = 220, value = short, range = null, legend = true, logarithmic = false }) {
    Object.assign(this, { label, height, value, range, logarithmic });
    this.series = [];
    this.along = ALONG.step;
    this.hidden = new Set();
    this.cursor = null; // a value along x
    this.picture = svg("svg", { class: "picture", "aria-hidden": "true", focusable: "false" });
    this.readout = element("div", { class: "readout", hidden: true });
    this.plot = element("div", {
      class: "plot", role: "slider", tabindex: "0", "aria-label": `${label}, value by value`,
      "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0", "aria-valuetext": "no values yet",
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
    this.#name();
    this.draw();
  }

  get shown() {
    return this.series.filter((one) => !this.hidden.has(one.name));
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.frame = this.#frame(width);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.picture.replaceChildren();
    if (!this.frame) return;
    this.#axes();
    for (const one of this.shown) this.#band(one);
    for (const one of this.shown) this.#curve(one);
    this.marker = svg("g", { class: "marker" });
    this.picture.append(this.marker);
    this.#read();
  }

  #frame(width) {
    const xs = this.shown.flatMap((one) => [one.x[0], one.x.at(-1)]).filter(known);
    let low = Infinity, high = -Infinity;
    for (const one of this.shown) {
      for (const values of [one.mean, one.low ?? [], one.high ?? []]) {
        for (const value of values) {
          if (!known(value)) continue;
          low = Math.min(low, value);
          high = Math.max(high, value);
        }
      }
    }
    if (!xs.length || low > high) return null;
    const bend = this.logarithmic && low > 0 ? Math.log : (value) => value;
    const slack = (high - low || Math.abs(high) || 1) * 0.06;
    const least = bend === Math.log ? low * (low / high) ** 0.06 * 0.995 : low - slack;
    [low, high] = [this.range?.[0] ?? least, this.range?.[1] ?? high + slack];
    const most = Math.max(2, Math.floor(this.height / 48));
    const y = bend === Math.log ? logTicks(low, high, most) : roundTicks(low, high, most);
    const labels = y.ticks.map((tick) => this.#label(tick, y.step));
    const left = Math.ceil(10 + 6.7 * Math.max(...labels.map((label) => label.length)));
    const [from, to] = [Math.min(...xs), Math.max(...xs)];
    const frame = { left, right: width - 14, top: 10, bottom: this.height - 22, from, to: to > from ? to : from + 1, y, labels };
    frame.toX = (x) => frame.left + (x - frame.from) / (frame.to - frame.from) * (frame.right - frame.left);
    frame.toY = (y) => frame.bottom - (bend(y) - bend(low)) / (bend(high) - bend(low)) * (frame.bottom - frame.top);
    return frame;
  }

  #label(tick, step) {
    if (tick === 0) return this.value(0).replace(/^0\.0+$/, "0");
    const text = this.value(tick);
    return /^-?[\d.]+$/.test(text) && step < 1000 && step >= 1e-4 ? decimals(tick, step) : text;
  }

  #axes() {
    const { left, right, bottom, from, to, y, labels, toX, toY } = this.frame;
    y.ticks.forEach((tick, at) => {
      const place = toY(tick).toFixed(1);
      this.picture.append(
        svg("line", { class: "grid", x1: left, x2: right, y1: place, y2: place }),
        svg("text", { class: "tick", x: left - 8, y: place, "text-anchor": "end", dy: "0.32em" }, labels[at]));
    });
    const x = this.along.ticks(from, to, Math.max(3, Math.floor((right - left) / 84)));
    for (const tick of x.ticks) {
      const place = toX(tick);
      const anchor = place > right - 18 ? "end" : place < left + 12 ? "start" : "middle";
      const shift = anchor === "end" ? 12 : anchor === "start" ? -8 : 0;
      this.picture.append(svg("text", { class: "tick", x: (place + shift).toFixed(1), y: bottom + 17, "text-anchor": anchor },
        this.along.tick(tick, x.step)));
    }
  }

  #band(one) {
    if (!one.low || !one.high) return;
    const { toX, toY } = this.frame;
    for (const run of runs(one.x, one.low, one.high)) {
      const up = run.map((at) => `${toX(one.x[at]).toFixed(1)},${toY(one.high[at]).toFixed(1)}`);
      const down = run.reverse().map((at) => `${toX(one.x[at]).toFixed(1)},${toY(one.low[at]).toFixed(1)}`);
      this.picture.append(svg("path", { class: `band ${one.colour}`, d: `M${up.join("L")}L${down.join("L")}Z` }));
    }
  }

  #curve(one) {
    const { toX, toY } = this.frame;
    const path = runs(one.x, one.mean).map((run) => "M" + run.map((at) => `${toX(one.x[at]).toFixed(1)},${toY(one.mean[at]).toFixed(1)}`).join("L"));
    this.picture.append(svg("path", { class: `curve ${one.colour} ${one.style ?? ""}`, d: path.join("") }));
    const isFew = one.x.length <= Math.max(24, (this.frame.right - this.frame.left) / 12);
    one.x.forEach((x, at) => {
      if (!known(one.mean[at])) return;
      if ((one.dots && isFew) || one.x.length === 1) {
        this.picture.append(svg("circle", { class: `dot ${one.colour}`, cx: toX(x).toFixed(1), cy: toY(one.mean[at]).toFixed(1), r: 2.6 }));
      }
    });
  }

  #name() {
    if (!this.legend) return;
    const entries = this.series.filter((one) => !one.unnamed).slice(0, MOST_NAMED + 1);
    const key = JSON.stringify(entries.map((one) => one.name));
    if (key !== this.named) {
      this.named = key;
      this.legend.replaceChildren(...entries.map((one) => element("li", {}, element("button", {
        type: "button", "aria-pressed": String(!this.hidden.has(one.name)), onclick: (event) => this.#toggle(one.name, event.currentTarget),
      }, element("span", { class: `key ${one.colour} ${one.style ?? ""}`, "aria-hidden": "true" }), element("span", { class: "name" }, plain(one.name, 60)),
      element("span", { class: "latest" })))));
    }
    const latest = this.legend.querySelectorAll(".latest");
    entries.forEach((one, at) => { latest[at].textContent = one.unvalued ? "" : this.value(one.mean.findLast(known)); });
  }

  #toggle(name, button) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
    this.draw();
  }

  #point(event) {
    if (!this.frame) return;
    const { left, right, from, to } = this.frame;
    const place = event.clientX - this.plot.getBoundingClientRect().left;
    this.cursor = from + Math.min(1, Math.max(0, (place - left) / (right - left))) * (to - from);
    this.#read();
  }

  #leave() {
    this.cursor = null;
    this.#read();
  }

  #key(event) {
    const longest = this.shown.reduce((most, one) => (one.x.length > (most?.x.length ?? 0) ? one : most), null);
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.#leave();
    if (!longest || move === undefined) return;
    event.preventDefault();
    const at = this.cursor === null ? longest.x.length - 1 : nearest(longest.x, this.cursor) + move;
    this.cursor = longest.x[Math.min(longest.x.length - 1, Math.max(0, at))];
    this.#read();
  }

  /** Shows the values at the cursor beside it, and tells them to a screen reader. */
  #read() {
    this.marker?.replaceChildren();
    this.readout.hidden = this.cursor === null || !this.frame;
    if (this.readout.hidden) return;
    const found = this.shown.map((one) => ({ one, at: nearest(one.x, this.cursor) }));
    const main = found.reduce((best, next) => (Math.abs(next.one.x[next.at] - this.cursor) < Math.abs(best.one.x[best.at] - this.cursor) ? next : best));
    const x = main.one.x[main.at];
    const title = this.along.value(x);
    const lines = found.map(({ one, at }) => ({ one, y: one.mean[at], text: this.#words(one, at) }));
    const place = this.frame.toX(x);
    this.marker.append(svg("line", { x1: place, x2: place, y1: this.frame.top, y2: this.frame.bottom }));
    found.forEach(({ one, at }) => {
      if (known(one.mean[at])) this.marker.append(svg("circle", { class: `dot ${one.colour}`, cx: this.frame.toX(one.x[at]), cy: this.frame.toY(one.mean[at]), r: 3.5 }));
    });
    const rows = lines.slice(0, MOST_NAMED).map(({ one, text }) =>
      element("p", {}, element("span", { class: `key ${one.colour} ${one.style ?? ""}` }), element("span", { class: "name" }, plain(one.name, 28)), element("b", {}, text)));
    if (lines.length > MOST_NAMED) rows.push(element("p", { class: "more" }, `and ${lines.length - MOST_NAMED} more`));
    this.readout.replaceChildren(element("p", { class: "title" }, title), ...rows);
    const width = this.readout.offsetWidth;
    const free = this.plot.clientWidth;
    this.readout.style.left = `${Math.max(0, Math.min(free - width, place + 14 + width > free ? place - 14 - width : place + 14))}px`;
    const { from, to } = this.frame;
    for (const [name, value] of Object.entries({ valuemin: from, valuemax: to, valuenow: x })) this.plot.setAttribute(`aria-${name}`, String(value));
    this.plot.setAttribute("aria-valuetext", `${title}: ${lines.slice(0, MOST_NAMED).map(({ one, text }) => `${plain(one.name, 28)} ${text}`).join(", ")}`);
  }

  #words(one, at) {
    const value = this.value(one.mean[at]);
    if (value === NONE) return NONE;
    return one.notes?.[at] ? `${value} (${one.notes[at]})` : value;
  }
}

/** Returns the indices at which all of these arrays hold numbers, cut where they do not. */
function runs(...arrays) {
  const found = [];
  let open = null;
  for (let at = 0; at < arrays[0].length; at += 1) {
    if (!arrays.every((values) => known(values[at]))) open = null;
    else if (open) open.push(at);
    else found.push((open = [at]));
  }
  return found;
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
