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
    this.now = null;
    this.ahead = null; // seconds of the run minus those of the page's clock
    this.seen = performance.now();
    this.trusted = 5; // seconds after the last news for which the window moves on
    this.wanted = 0; // the animation frame that is asked for
    this.isInSight = true;
    new ResizeObserver(() => this.draw()).observe(this.node);
    new IntersectionObserver(([entry]) => {
      this.isInSight = entry.isIntersecting;
      this.#schedule();
    }).observe(this.node);
  }

  /** Takes the window `now` and the lanes; null stops the clock. */
  show(now, lanes) {
    this.now = now;
    this.lanes = lanes;
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
    this.drawing.colours = colours();
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
    const { now, drawing, lanes } = this;
    const length = Math.max(5, now.to_s - now.from_s - LAG_S);
    const clock = Math.min(now.to_s + this.trusted, this.ahead + performance.now() / 1000);
    const to = STILL.matches ? now.to_s : clock - LAG_S;
    if (!drawing.begin(lanes.workers, to - length, to)) return;
    drawing.axis(to);
    drawing.names();
    drawing.clip();
    const details = new Map(now.workers.map((one) => [one.worker, one]));
    lanes.workers.forEach((lane, at) => {
      drawing.presence(at, lane, { end: lanes.end_s, now: to + 1 });
      drawing.spans(at, details.get(lane.worker) ?? {}, to + 1);
    });
    drawing.unclip();
    drawing.marks();
  }
}
