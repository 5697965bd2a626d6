// Draws the lanes of workers on a canvas: a thick bar for the processor, thin ones below it for rounds on their way.

import { MOST_COLOURS } from "./colours.js";
import { timeTicks } from "./ticks.js";
import { known, moment } from "./units.js";

const AXIS = 24;

/** Returns how high lanes are for this many workers, in pixels: of the bar, of the rounds below it, and of both. */
function laneHeights(workers) {
  if (workers <= 12) return { bar: 13, rounds: 11, lane: 32 };
  return workers <= 32 ? { bar: 8, rounds: 6, lane: 18 } : { bar: 5, rounds: 3, lane: 10 };
}

/** Returns the height of a drawing of this many workers, in pixels. */
const laneHeight = (workers) => laneHeights(workers).lane * Math.max(1, workers) + AXIS;

/** Reads the page's colours, which change with light and dark. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  return {
    paper: value("--paper"), ink: value("--ink"), muted: value("--muted"), grid: value("--grid"), idle: value("--idle"),
    series: Array.from({ length: MOST_COLOURS }, (_, at) => value(`--run-${at}`)),
    font: getComputedStyle(document.body).fontFamily,
  };
}

/** A canvas as wide as its box, with the window of seconds that it shows. */
export class LaneDrawing {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.colours = colours();
  }

  /** Clears the canvas for these workers and seconds; false if it is not visible. */
  begin(workers, from, to) {
    const width = this.canvas.parentElement.clientWidth;
    if (width) this.#lay({ workers, from, to, width, left: width < 560 ? 26 : 78, right: width - 10 });
    return width > 0;
  }

  /** Clears the canvas for other seconds at the scale of a drawing onto which it will be copied. */
  beginStrip(drawing, from, to) {
    const width = (drawing.right - drawing.left) * (to - from) / (drawing.to - drawing.from);
    this.#lay({ workers: drawing.workers, from, to, width, left: 0, right: width });
  }

  #lay(layout) {
    const { workers, width } = layout;
    const height = laneHeight(workers.length);
    const scale = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    Object.assign(this, layout, { height, heights: laneHeights(workers.length) });
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.context.clearRect(0, 0, width, height);
  }

  /** Copies a strip to where its seconds are. */
  copy(strip) {
    this.context.drawImage(strip.canvas, this.toX(strip.from), 0, strip.width, strip.height);
  }

  toX(seconds) {
    return this.left + (seconds - this.from) / (this.to - this.from) * (this.right - this.left);
  }

  top(at) {
    return at * this.heights.lane + (this.heights.lane - this.heights.bar - this.heights.rounds) / 2;
  }

  /** Draws the time axis; `end` counts back from there ("-20 s") if given. */
  axis(end = null) {
    const { context } = this;
    const most = Math.max(2, Math.floor((this.right - this.left) / 80));
    const origin = end ?? 0;
    const { ticks, step } = timeTicks(this.from - origin, this.to - origin, most);
    context.font = `12px ${this.colours.font}`;
    context.textBaseline = "alphabetic";
    for (const tick of ticks) {
      const x = this.toX(tick + origin);
      context.fillStyle = this.colours.grid;
      context.fillRect(Math.round(x), 0, 1, this.height - AXIS + 2);
      context.fillStyle = this.colours.muted;
      const text = end === null ? moment(tick, step) : tick > -step / 2 ? "now" : `−${moment(-tick, step)}`;
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(this.right - 2 * half + 8, Math.max(this.left - 2, x - half)), this.height - 6);
    }
  }

  /** Names the lanes, beside their bars. */
  names() {
    const { context, heights } = this;
    const every = Math.ceil(13 / heights.lane);
    context.font = `12px ${this.colours.font}`;
    context.textBaseline = "middle";
    context.fillStyle = this.colours.ink;
    this.workers.forEach(({ worker }, at) => {
      const name = this.left < 40 ? String(worker) : `worker ${worker}`;
      if (at % every === 0) context.fillText(name, 0, this.top(at) + heights.bar / 2 + 1);
    });
  }

  clip() {
    this.context.save();
    this.context.beginPath();
    this.context.rect(this.left, 0, this.right - this.left, this.height);
    this.context.clip();
  }

  unclip() {
    this.context.restore();
  }

  /** Draws what a worker did: from its spans of training, catching up, away, paused and gone. */
  presence(at, lane, until) {
    const { context, heights } = this;
    const y = this.top(at);
    const own = this.colours.series[lane.worker % MOST_COLOURS];
    for (const [begin, end, kind] of lane.spans ?? []) {
      const isLast = end >= until.end - 1e-6;
      const [x, right] = [this.toX(begin), this.toX(isLast ? until.now : end)];
      if (right < this.left || x > this.right || kind === "gone") continue;
      const width = Math.max(1, right - x);
      context.globalAlpha = kind === "catching up" ? 0.4 : 1;
      if (kind === "training" || kind === "catching up") this.#rect(x, y, width, heights.bar, own);
      else if (kind === "paused") this.#hatched(x, y, width, heights.bar, own);
      else this.#rect(x, y + heights.bar / 2 - 0.5, width, 1, this.colours.muted);
      context.globalAlpha = 1;
    }
  }

  #rect(x, y, width, height, colour) {
    this.context.fillStyle = colour;
    this.context.fillRect(x, y, width, height);
  }

  #hatched(x, y, width, height, colour) {
    const { context } = this;
    this.#rect(x, y, width, height, this.colours.idle);
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.clip();
    context.strokeStyle = colour;
    context.lineWidth = 1.5;
    context.beginPath();
    const first = Math.floor((Math.max(x, this.left) - height) / 6) * 6;
    for (let at = first; at < Math.min(x + width, this.right); at += 6) {
      context.moveTo(at, y + height);
      context.lineTo(at + height, y);
    }
    context.stroke();
    context.restore();
  }

  /** Draws buckets over the whole run: how much of each was waiting, and how many rounds were on their way. */
  buckets(at, lane, most) {
    const { heights } = this;
    const y = this.top(at);
    const bucket = lane.bucket_s;
    if (!known(bucket) || bucket <= 0) return;
    const begin = lane.from_s ?? 0;
    const first = Math.max(0, Math.floor((this.from - begin) / bucket));
    const buckets = Math.max(lane.waiting?.length ?? 0, lane.flying?.length ?? 0);
    const last = Math.min(buckets, Math.ceil((this.to - begin) / bucket));
    const width = this.toX(bucket) - this.toX(0) + 0.4;
    this.context.globalAlpha = 0.75;
    for (let n = first; n < last; n += 1) {
      const flying = lane.flying?.[n];
      const height = known(flying) && flying > 0 ? Math.max(1, Math.min(1, flying / most) * (heights.rounds - 1)) : 0;
      if (height) this.#rect(this.toX(begin + n * bucket), y + heights.bar + 1.5, width, height, this.colours.muted);
    }
    this.context.globalAlpha = 1;
    for (let n = first; n < last; n += 1) {
      const height = Math.min(1, lane.waiting?.[n] ?? 0) * heights.bar;
      if (height > 0.05) this.#rect(this.toX(begin + n * bucket), y, width, height, this.colours.idle);
    }
  }

  /** Draws single waits and rounds: [begin, end] and [begin, end, step, fragment, row]. */
  spans(at, detail, now) {
    const { heights } = this;
    const y = this.top(at);
    this.context.fillStyle = this.colours.idle;
    for (const [begin, end] of detail.waits ?? []) this.#span(begin, end, y, heights.bar);
    const rows = Math.max(1, Math.floor((heights.rounds - 1) / 3));
    const thick = heights.rounds > 4 ? 2 : 1;
    this.context.fillStyle = this.colours.muted;
    const line = (begin, end, row) => this.#span(begin, end, y + heights.bar + 2 + (row % rows) * 3, thick);
    for (const [begin, end, , , row] of detail.flights ?? []) line(begin, end, row ?? 0);
    (detail.on_their_way ?? []).forEach(([, , since], row) => line(since, now, row));
  }

  /** Fills a span if it is in sight: at least wide enough to be seen, and a little apart from the next one. */
  #span(begin, end, y, height) {
    if (end < this.from || begin > this.to) return;
    const x = this.toX(begin);
    this.context.fillRect(x, y, Math.max(0.75, this.toX(end) - x - 0.5), height);
  }

  /** Draws where the members of the run changed: [seconds, number] of each view. */
  views(views) {
    const { context } = this;
    context.strokeStyle = this.colours.muted;
    context.lineWidth = 1;
    context.setLineDash([1, 3]);
    context.beginPath();
    for (const [seconds] of views ?? []) {
      const x = Math.round(this.toX(seconds)) + 0.5;
      context.moveTo(x, 0);
      context.lineTo(x, this.height - AXIS);
    }
    context.stroke();
    context.setLineDash([]);
  }

  /** Draws where workers joined, left, were lost or resumed. */
  marks() {
    const half = Math.min(5, this.heights.bar / 2 + 1);
    this.workers.forEach((lane, at) => {
      for (const [seconds, kind] of lane.marks ?? []) {
        if (seconds < this.from || seconds > this.to) continue;
        const x = Math.min(this.right - half, Math.max(this.left + half, this.toX(seconds)));
        this.#mark(x, this.top(at) + this.heights.bar / 2, half, kind === "lost" || kind === "left");
      }
    });
  }

  /** Draws a cross or a triangle, with a rim that sets it off from the bar. */
  #mark(x, y, half, isCross) {
    const { context } = this;
    context.beginPath();
    if (isCross) {
      context.moveTo(x - half, y - half);
      context.lineTo(x + half, y + half);
      context.moveTo(x + half, y - half);
      context.lineTo(x - half, y + half);
    } else {
      context.moveTo(x - half, y + half);
      context.lineTo(x, y - half);
      context.lineTo(x + half, y + half);
      context.closePath();
    }
    for (const [width, colour] of [[4, this.colours.paper], [2, this.colours.ink]]) {
      context.lineWidth = width;
      context.strokeStyle = colour;
      context.stroke();
    }
    context.fillStyle = this.colours.ink;
    if (!isCross) context.fill();
  }

  /** Draws a vertical line, or the part that a mouse selects. */
  cursor(seconds, drag) {
    const { context } = this;
    if (drag) {
      const [x, right] = [drag.from, drag.to].map((share) => this.left + share * (this.right - this.left));
      context.globalAlpha = 0.15;
      this.#rect(x, 0, right - x, this.height - AXIS, this.colours.ink);
      context.globalAlpha = 1;
    } else if (seconds !== null) this.#rect(Math.round(this.toX(seconds)), 0, 1, this.height - AXIS, this.colours.ink);
  }
}
