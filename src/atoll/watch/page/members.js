// Members over time: the last minute as it scrolls, and the whole run with zoom.

import { element, plain, setText } from "./dom.js";
import { LaneDrawing, colours } from "./lanes.js";
import { Part } from "./part.js";
import { presence } from "./state.js";
import { FoldedTable } from "./table.js";
import { count, duration, known, NONE, share } from "./units.js";
import { Zoom } from "./zoom.js";

const LAG_S = 1; // the live window shows this much less than is known, so that it scrolls evenly
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const MOVING = new Set(["training", "waiting for a round", "stalled", "paused"]);

export class Members {
  /** `detail(from, to)` promises the single waits and rounds between two times, or is null on a frozen page. */
  constructor(level, detail) {
    this.part = new Part("Members", { level, wide: true });
    this.node = this.part.node;
    this.detail = detail;
    this.live = new LiveLanes();
    this.overview = new RunLanes(detail);
    this.liveBox = element("div", { class: "lanes" }, element(`h${level + 1}`, {}, "The last minute"), this.live.node);
    this.table = new FoldedTable("members and their waits");
    this.part.body.append(legend(), this.liveBox, element("div", { class: "lanes" }, element("div", { class: "head" },
      element(`h${level + 1}`, {}, "The whole run"), this.overview.buttons), this.overview.node, this.overview.hint), this.table.node);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const lanes of [this.live, this.overview]) lanes.recolour();
    });
  }

  show({ lanes, now, run = {} }) {
    const isThere = Boolean(lanes?.workers?.length);
    this.part.reveal(isThere);
    this.part.say(isThere ? sentence(lanes, run) : "No worker has begun yet.");
    if (!isThere) return;
    const isLive = Boolean(this.detail && now && MOVING.has(run.state));
    this.liveBox.hidden = !isLive;
    this.live.show(isLive ? now : null, lanes);
    this.overview.show(lanes, now);
    this.table.show(() => rows(lanes));
  }
}

/** Shows the last minute, moving with the clock between two updates. */
class LiveLanes {
  constructor() {
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.node = element("div", { class: "canvas" }, this.canvas);
    this.drawing = new LaneDrawing(this.canvas);
    this.now = null;
    this.ahead = null; // seconds of the run minus those of the page's clock
    this.wanted = 0;
    this.seen = performance.now();
    this.trusted = 5; // seconds after the last news for which the window moves on
    this.isSeen = true;
    new ResizeObserver(() => this.draw()).observe(this.node);
    new IntersectionObserver(([entry]) => { this.isSeen = entry.isIntersecting; this.#schedule(); }).observe(this.node);
  }

  show(now, lanes) {
    this.now = now;
    this.lanes = lanes;
    if (!now) return;
    const ahead = now.to_s - performance.now() / 1000;
    const drift = ahead - this.ahead;
    // A small difference is jitter of the network and is smoothed; a large one is a pause or a new run.
    this.ahead = this.ahead === null || Math.abs(drift) > 3 ? ahead : this.ahead + 0.1 * drift;
    const gap = (performance.now() - this.seen) / 1000;
    this.trusted = Math.min(15, Math.max(5, 2 * gap)); // workers that log rarely are believed to go on for longer
    this.seen = performance.now();
    if (STILL.matches) this.draw();
    else this.#schedule();
  }

  recolour() {
    this.drawing.colours = colours();
    this.draw();
  }

  #schedule() {
    if (!this.wanted && this.now && this.isSeen && !STILL.matches) this.wanted = requestAnimationFrame(() => this.#frame());
  }

  #frame() {
    this.wanted = 0;
    this.draw();
    if (performance.now() - this.seen < 1000 * this.trusted) this.#schedule(); // without news, time stands still
  }

  draw() {
    if (!this.now) return;
    const { now, drawing } = this;
    const length = Math.max(5, now.to_s - now.from_s - LAG_S);
    const to = STILL.matches ? now.to_s : Math.min(now.to_s + this.trusted, this.ahead + performance.now() / 1000) - LAG_S;
    if (!drawing.begin(this.lanes.workers, to - length, to)) return;
    drawing.axis(to);
    drawing.names();
    drawing.clip();
    const byWorker = new Map((now.workers ?? []).map((one) => [one.worker, one]));
    this.lanes.workers.forEach((lane, at) => {
      drawing.presence(at, lane, { end: this.lanes.end_s, now: to + 1 });
      drawing.spans(at, byWorker.get(lane.worker) ?? {}, to + 1);
    });
    drawing.unclip();
    drawing.marks();
  }
}

/** Shows any part of the run, with buttons, keys and gestures that change which. */
class RunLanes {
  constructor(detail) {
    this.detail = detail;
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.readout = element("div", { class: "readout", hidden: true });
    this.node = element("div", { class: "canvas zooms", role: "group", tabindex: "0", "aria-label": "Lanes over the whole run: plus and minus zoom, arrows move, 0 shows all" }, this.canvas, this.readout);
    this.drawing = new LaneDrawing(this.canvas);
    this.hint = element("p", { class: "hint" });
    this.zoom = new Zoom(() => this.changed());
    const button = (name, label, act) => element("button", { type: "button", "aria-label": label, title: label, onclick: act }, name);
    this.buttons = element("div", { class: "choices", role: "group", "aria-label": "Zoom" }, button("←", "Earlier", () => this.zoom.move(-0.5)),
      button("→", "Later", () => this.zoom.move(0.5)), button("−", "Zoom out", () => this.zoom.by(0.5)), button("+", "Zoom in", () => this.zoom.by(2)), button("All", "The whole run", () => this.zoom.all()));
    this.at = null; // the pointer: seconds and lane
    this.zoom.listen(this.node, (x) => (x - this.canvas.getBoundingClientRect().left - this.drawing.left) / (this.drawing.right - this.drawing.left));
    this.node.addEventListener("pointermove", (event) => this.#point(event));
    this.node.addEventListener("pointerdown", (event) => this.#point(event));
    this.node.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  show(lanes, now) {
    this.lanes = lanes;
    this.latest = now;
    this.zoom.grow(lanes.end_s);
    this.changed();
  }

  changed() {
    this.#fetch();
    this.draw();
  }

  recolour() {
    this.drawing.colours = colours();
    this.draw();
  }

  /** Asks for single waits and rounds where buckets are too coarse, once at a time and a little more than is in sight. */
  async #fetch() {
    const { from, to, end } = this.zoom;
    const bucket = Math.max(...this.lanes.workers.map((lane) => lane.bucket_s ?? 0));
    const isCovered = this.found && this.found.from_s <= from && this.found.to_s >= Math.min(to, end) && to - from > (this.found.to_s - this.found.from_s) / 8;
    if (!this.detail || this.isAsking || isCovered || to - from > 200 * bucket) return;
    this.isAsking = true;
    const margin = (to - from) / 2;
    try {
      this.found = await this.detail(Math.max(0, from - margin), Math.min(end, to + margin));
    } catch {
      // The connection says that it is gone; buckets stay in sight.
    } finally {
      setTimeout(() => { this.isAsking = false; }, 250);
    }
    this.draw();
  }

  draw() {
    if (!this.lanes) return;
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
    drawing.cursor(this.at?.seconds ?? null, zoom.drag);
    drawing.views(lanes.views);
    drawing.unclip();
    drawing.marks();
    this.#read(fine);
    const part = zoom.whole ? "Drag over a part to zoom in" : `${duration(zoom.to - zoom.from)} from ${duration(zoom.from)} on; double-click for the whole run`;
    setText(this.hint, `${part}. Ctrl and the wheel, two fingers, or the keys + − ← → work, too.`);
  }

  /** Returns single waits and rounds by worker, if those of the window in sight are here. */
  #fine() {
    const { from, to, end } = this.zoom;
    const covers = (one) => one && one.from_s <= from + 1e-6 && one.to_s >= Math.min(to, end) - 1e-6 && to - from < 0.9 * Math.max(end, 1);
    const found = [this.found, this.latest].find(covers);
    return found ? new Map(found.workers.map((one) => [one.worker, one])) : null;
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    const { left, right, heights } = this.drawing;
    const place = (event.clientX - box.left - left) / (right - left);
    const lane = Math.floor((event.clientY - box.top) / heights.lane);
    const isInside = place >= 0 && place <= 1 && lane >= 0 && lane < this.lanes.workers.length;
    this.at = isInside ? { seconds: this.zoom.from + place * (this.zoom.to - this.zoom.from), lane } : null;
    this.draw();
  }

  #read(fine) {
    this.readout.hidden = !this.at || Boolean(this.zoom.drag);
    if (this.readout.hidden) return;
    const { seconds, lane: at } = this.at;
    const lane = this.lanes.workers[at];
    const lines = [`worker ${lane.worker}: ${doing(lane, fine?.get(lane.worker), seconds)}`, ...near(lane, seconds, (this.zoom.to - this.zoom.from) / 60)];
    this.readout.replaceChildren(element("p", { class: "title" }, `after ${duration(seconds)}`), ...lines.map((line) => element("p", {}, line)));
    const place = this.drawing.toX(seconds);
    const width = this.readout.offsetWidth;
    const free = this.node.clientWidth;
    this.readout.style.left = `${Math.max(0, Math.min(free - width, place + 14 + width > free ? place - 14 - width : place + 14))}px`;
    this.readout.style.top = `${this.drawing.top(at) + this.drawing.heights.lane}px`;
  }
}

/** Says what a worker did at a time. */
function doing(lane, fine, seconds) {
  const kind = lane.spans?.find(([begin, end]) => begin <= seconds && seconds <= end)?.[2] ?? "not there";
  if (fine) {
    const wait = fine.waits?.find(([begin, end]) => begin <= seconds && seconds <= end);
    const flights = (fine.flights ?? []).filter(([begin, end]) => begin <= seconds && seconds <= end);
    const rounds = flights.slice(0, 3).map(([begin, end, step, fragment]) => `${step < 0 ? "several rounds" : `round of step ${count(step)}, fragment ${count(fragment)}`} (${duration(end - begin)})`);
    return [wait ? `waiting for ${duration(wait[1] - wait[0])}` : kind, ...rounds, flights.length > 3 ? `${flights.length - 3} rounds more` : ""].filter(Boolean).join("; ");
  }
  const bucket = Math.floor((seconds - (lane.from_s ?? 0)) / lane.bucket_s);
  const waiting = lane.waiting?.[bucket];
  const flying = lane.flying?.[bucket];
  return [kind, known(waiting) ? `waiting ${share(waiting)} of the time` : "", known(flying) ? `${flying.toFixed(1)} rounds on their way` : ""].filter(Boolean).join("; ");
}

/** Returns the words of changes close to a time. */
function near(lane, seconds, distance) {
  return (lane.marks ?? []).filter(([at]) => Math.abs(at - seconds) < distance).slice(0, 3).map(([, kind, words]) => plain(words || kind, 160));
}

function legend() {
  const entry = (kind, name) => element("li", {}, element("span", { class: `key lane ${kind}`, "aria-hidden": "true" }), name);
  return element("ul", { class: "legend plain" }, entry("training", "training"), entry("idle", "waiting"), entry("catching", "catching up"), entry("away", "away"),
    entry("paused", "paused"), entry("rounds", "rounds on their way"), entry("joined", "joined"), entry("lost", "lost or left"), entry("view", "new view"));
}

function waitingShare(lane) {
  const shares = (lane.waiting ?? []).filter(known);
  return shares.length ? shares.reduce((sum, one) => sum + one, 0) / shares.length : null;
}

function sentence(lanes, run) {
  const seats = lanes.workers.map((lane) => presence(lane, lanes.end_s));
  const training = seats.filter(({ kind }) => kind === "training").length;
  const others = seats.filter(({ kind }) => kind !== "training").slice(0, 4).map(({ worker, kind, since }) => `worker ${worker} is ${kind}${since && ` (${since.trim()})`}`);
  const most = lanes.workers.map((lane) => [lane.worker, waitingShare(lane)]).filter(([, part]) => known(part)).sort((a, b) => b[1] - a[1])[0];
  const waits = most ? ` Worker ${most[0]} waited most, ${share(most[1])} of its time.` : "";
  if (run.state === "finished") return `${count(seats.length)} ${seats.length === 1 ? "worker" : "workers"} took part.${waits}`;
  return `${training} of ${seats.length} train${others.length ? `; ${others.join(", ")}` : ""}.${waits}`;
}

function rows(lanes) {
  return {
    columns: ["worker", "now", "trained", "waited", "changes"],
    rows: lanes.workers.map((lane) => {
      const trained = (lane.spans ?? []).filter(([, , kind]) => kind === "training").reduce((sum, [begin, end]) => sum + end - begin, 0);
      const changes = (lane.marks ?? []).slice(-6).map(([at, kind, words]) => `${duration(at)}: ${plain(words || kind, 120)}`);
      const { kind, since } = presence(lane, lanes.end_s);
      return [count(lane.worker), kind + since, duration(trained), share(waitingShare(lane)), changes.join("; ") || NONE];
    }),
  };
}
