// The last minute of the lanes, moving with the clock between two updates.

import { element } from "./dom.js";
import { LaneDrawing, colours } from "./lanes.js";

const LAG_S = 1; // the window ends this much before the newest that is known, so that it moves evenly
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

export class LiveLanes {
  constructor() {
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.node = element("div", { class: "canvas" }, this.canvas);
    this.drawing = new LaneDrawing(this.canvas);
    this.strip = new LaneDrawing(element("canvas")); // the lanes, drawn once for every update and copied in every frame
    this.isPainted = false;
    this.now = null;
    this.ahead = null; // seconds of the run minus those of the page's clock
    this.seen = performance.now();
    this.trusted = 5; // seconds after the last news for which the window moves on
    this.wanted = 0; // the animation frame that is asked for
    this.isInSight = true;
    new ResizeObserver(() => {
      this.isPainted = false;
      this.draw();
    }).observe(this.node);
    new IntersectionObserver(([entry]) => {
      this.isInSight = entry.isIntersecting;
      this.#schedule();
    }).observe(this.node);
  }

  /** Takes the window `now` and the lanes; null stops the clock. */
  show(now, lanes) {
    this.now = now;
    this.lanes = lanes;
    this.isPainted = false;
    if (!now) return;
    const ahead = now.to_s - performance.now() / 1000;
    const drift = ahead - this.ahead;
    // A small difference is jitter of the network and is smoothed; a large one is a pause or a new run.
    this.ahead = this.ahead === null || Math.abs(drift) > 3 ? ahead : this.ahead + 0.1 * drift;
    const gap_s = (performance.now() - this.seen) / 1000;
    this.trusted = Math.min(15, Math.max(5, 2 * gap_s)); // workers that log rarely are believed to go on for longer
    this.seen = performance.now();
    if (STILL.matches) this.draw();
    else this.#schedule();
  }

  recolour() {
    this.drawing.colours = this.strip.colours = colours();
    this.isPainted = false;
    this.draw();
  }

  #schedule() {
    if (this.wanted || !this.now || !this.isInSight || STILL.matches) return;
    this.wanted = requestAnimationFrame(() => {
      this.wanted = 0;
      this.draw();
      if (performance.now() - this.seen < 1000 * this.trusted) this.#schedule(); // without news, time stands still
    });
  }

  draw() {
    if (!this.now) return;
    const { now, drawing, strip } = this;
    const length = Math.max(5, now.to_s - now.from_s - LAG_S);
    const clock = Math.min(now.to_s + this.trusted, this.ahead + performance.now() / 1000);
    const to = STILL.matches ? now.to_s : clock - LAG_S;
    if (!drawing.begin(this.lanes.workers, to - length, to)) return;
    drawing.axis(to);
    drawing.names();
    if (!this.isPainted || strip.from > drawing.from || strip.to < to || strip.height !== drawing.height) this.#paint();
    drawing.clip();
    drawing.copy(strip);
    drawing.unclip();
  }

  /** Draws the lanes over the window and the seconds after it, into which it moves until the next news. */
  #paint() {
    const { strip, lanes } = this;
    strip.beginStrip(this.drawing, this.drawing.from, this.drawing.to + this.trusted);
    this.isPainted = true;
    const details = new Map(this.now.workers.map((one) => [one.worker, one]));
    lanes.workers.forEach((lane, at) => {
      strip.presence(at, lane, { end: lanes.end_s, now: strip.to });
      strip.spans(at, details.get(lane.worker) ?? {}, strip.to);
    });
    strip.marks();
  }
}
