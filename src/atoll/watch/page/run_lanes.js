// Lanes over the whole run or a part of it, which buttons, keys and gestures choose.

import { element, plain, putBeside, setText } from "./dom.js";
import { LaneDrawing, colours } from "./lanes.js";
import { count, duration, known, share } from "./units.js";
import { Zoom } from "./zoom.js";

const MOST_BUCKETS = 200; // in sight; with fewer, single waits and rounds are asked for
const ASK_AGAIN_MS = 250;
const AFTER_FAILURE_MS = 5000;
const HOW = "Ctrl and the wheel, two fingers, or the keys + − ← → work, too.";

export class RunLanes {
  /** `detail(from, to)` promises the single waits and rounds between two times, or is null. */
  constructor(detail) {
    this.detail = detail;
    this.lanes = { end_s: 0, workers: [], views: [] };
    this.latest = null; // single waits and rounds of the last minute
    this.found = null; // those that were asked for
    this.isAsking = false;
    this.pointed = null; // the pointer: seconds and a lane
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.readout = element("div", { class: "readout", hidden: true });
    this.node = element("div", {
      class: "canvas zooms", role: "group", tabindex: "0",
      "aria-label": "Lanes over the whole run: plus and minus zoom, arrows move, 0 shows all",
      onpointermove: (event) => this.#point(event), onpointerdown: (event) => this.#point(event),
      onpointerleave: () => this.#leave(),
    }, this.canvas, this.readout);
    this.drawing = new LaneDrawing(this.canvas);
    this.hint = element("p", { class: "hint" });
    this.zoom = new Zoom(() => this.#changed());
    this.zoom.listen(this.node, (x) => this.#place(x));
    this.buttons = element("div", { class: "choices", role: "group", "aria-label": "Zoom" },
      button("←", "Earlier", () => this.zoom.move(-0.5)), button("→", "Later", () => this.zoom.move(0.5)),
      button("−", "Zoom out", () => this.zoom.by(0.5)), button("+", "Zoom in", () => this.zoom.by(2)),
      button("All", "The whole run", () => this.zoom.all()));
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  show(lanes, latest) {
    this.lanes = lanes;
    this.latest = latest;
    this.zoom.grow(lanes.end_s);
    this.#changed();
  }

  recolour() {
    this.drawing.colours = colours();
    this.draw();
  }

  draw() {
    const { zoom, drawing, lanes } = this;
    if (!drawing.begin(lanes.workers, zoom.from, zoom.to)) return;
    drawing.axis();
    drawing.names();
    drawing.clip();
    const fine = this.#fine();
    const most = Math.max(1, ...lanes.workers.map((lane) => Math.max(0, ...(lane.flying ?? []).filter(known))));
    lanes.workers.forEach((lane, at) => {
      drawing.presence(at, lane, { end: lanes.end_s, now: lanes.end_s });
      if (fine) drawing.spans(at, fine.get(lane.worker) ?? {}, lanes.end_s);
      else drawing.buckets(at, lane, most);
    });
    drawing.cursor(this.pointed?.seconds ?? null, zoom.drag);
    drawing.views(lanes.views);
    drawing.unclip();
    drawing.marks();
    this.#read(fine);
    const window = `${duration(zoom.to - zoom.from)} from ${duration(zoom.from)} on; double-click for the whole run`;
    setText(this.hint, `${zoom.whole ? "Drag over a part to zoom in" : window}. ${HOW}`);
  }

  #changed() {
    this.#ask();
    this.draw();
  }

  /** Asks for single waits and rounds where buckets are too coarse, of a little more than is in sight. */
  async #ask() {
    const { from, to, end } = this.zoom;
    const bucket = Math.max(0, ...this.lanes.workers.map((lane) => lane.bucket_s));
    const isFine = this.#covers(this.found) && to - from > (this.found.to_s - this.found.from_s) / 8;
    if (!this.detail || this.isAsking || isFine || to - from > MOST_BUCKETS * bucket) return;
    this.isAsking = true;
    const margin = (to - from) / 2;
    let pause_ms = ASK_AGAIN_MS;
    try {
      this.found = await this.detail(Math.max(0, from - margin), Math.min(end, to + margin));
      this.draw();
    } catch {
      pause_ms = AFTER_FAILURE_MS; // buckets stay in sight, and the top of the page says what is wrong
    }
    setTimeout(() => {
      this.isAsking = false;
      if (!this.#covers(this.found)) this.#ask(); // the window has moved on meanwhile
    }, pause_ms);
  }

  #covers(detail) {
    const { from, to, end } = this.zoom;
    return Boolean(detail) && detail.from_s <= from + 0.01 && detail.to_s >= Math.min(to, end) - 0.01;
  }

  /** Returns single waits and rounds by worker, if a part of the run is in sight and they are here. */
  #fine() {
    const found = this.zoom.whole ? null : [this.found, this.latest].find((detail) => this.#covers(detail));
    return found ? new Map(found.workers.map((one) => [one.worker, one])) : null;
  }

  // ---- what is under the pointer

  /** Turns a clientX into a share of the width. */
  #place(x) {
    const { left, right } = this.drawing;
    return (x - this.canvas.getBoundingClientRect().left - left) / (right - left);
  }

  #point(event) {
    const place = this.#place(event.clientX);
    const lane = Math.floor((event.clientY - this.canvas.getBoundingClientRect().top) / this.drawing.heights.lane);
    const isInside = place >= 0 && place <= 1 && lane >= 0 && lane < this.lanes.workers.length;
    const { from, to } = this.zoom;
    this.pointed = isInside ? { seconds: from + place * (to - from), lane } : null;
    this.draw();
  }

  #leave() {
    this.pointed = null;
    this.draw();
  }

  #read(fine) {
    const lane = this.lanes.workers[this.pointed?.lane];
    this.readout.hidden = !lane || Boolean(this.zoom.drag);
    if (this.readout.hidden) return;
    const { seconds } = this.pointed;
    const does = fine ? singly(lane, fine.get(lane.worker) ?? {}, seconds) : overall(lane, seconds);
    const distance = (this.zoom.to - this.zoom.from) / 60;
    const marks = (lane.marks ?? []).filter(([at]) => Math.abs(at - seconds) < distance).slice(0, 3);
    const lines = [`worker ${lane.worker}: ${does}`, ...marks.map(([, kind, words]) => plain(words || kind, 160))];
    this.readout.replaceChildren(element("p", { class: "title" }, `after ${duration(seconds)}`),
      ...lines.map((line) => element("p", {}, line)));
    putBeside(this.readout, this.drawing.toX(seconds));
    this.readout.style.top = `${this.drawing.top(this.pointed.lane) + this.drawing.heights.lane}px`;
  }
}

function button(name, label, act) {
  return element("button", { type: "button", "aria-label": label, title: label, onclick: act }, name);
}

const holds = (seconds) => ([begin, end]) => begin <= seconds && seconds <= end;
const presenceAt = (lane, seconds) => plain(lane.spans?.find(holds(seconds))?.[2] ?? "not there", 20);

/** Says what a worker did at a time, from single waits and rounds. */
function singly(lane, { waits = [], flights = [] }, seconds) {
  const wait = waits.find(holds(seconds));
  const rounds = flights.filter(holds(seconds)).map(([begin, end, step, fragment]) => {
    const which = step < 0 ? "several rounds" : `round of step ${count(step)}, fragment ${count(fragment)}`;
    return `${which} (${duration(end - begin)})`;
  });
  const more = rounds.length > 3 ? [`${rounds.length - 3} rounds more`] : [];
  const does = wait ? `waiting for ${duration(wait[1] - wait[0])}` : presenceAt(lane, seconds);
  return [does, ...rounds.slice(0, 3), ...more].join("; ");
}

/** Says what a worker did around a time, from buckets. */
function overall(lane, seconds) {
  const bucket = Math.floor((seconds - (lane.from_s ?? 0)) / lane.bucket_s);
  const [waiting, flying] = [lane.waiting?.[bucket], lane.flying?.[bucket]];
  const found = [presenceAt(lane, seconds)];
  if (known(waiting)) found.push(`waiting ${share(waiting)} of the time`);
  if (known(flying)) found.push(`${flying.toFixed(1)} rounds on their way`);
  return found.join("; ");
}
