// Charts of one number over the run: speed, utilisation, learning rate, and the outer gradient's norm and cosine.

import { Chart } from "./chart.js";
import { choices, element } from "./dom.js";
import { Part } from "./part.js";
import { isOver } from "./state.js";
import { FoldedTable } from "./table.js";
import { cosine, count, duration, known, mean, share, short, small } from "./units.js";

export class Speed {
  constructor(level) {
    this.part = new Part("Speed", { level });
    this.node = this.part.node;
    this.along = "seconds";
    this.charts = {
      tokens_per_s: single("Tokens a second, all workers", 110, short, [0, null]),
      utilisation: single("Utilisation", 110, share, [0, 1]),
      lr: single("Learning rate", 110, small, [0, null]),
    };
    this.boxes = Object.fromEntries(Object.entries(this.charts).map(([key, chart]) => [key, titled(chart, level)]));
    this.table = new FoldedTable("speed over time");
    this.part.controls.append(choices("Along", { seconds: "Time", step: "Steps" }, (key) => {
      this.along = key;
      this.draw();
    }));
    this.part.body.append(...Object.values(this.boxes), this.table.node);
  }

  show(sections) {
    this.content = sections.speed;
    const isThere = Boolean(this.content?.step?.length);
    this.part.reveal(isThere);
    this.part.say(isThere ? this.#sentence(sections.run) : "No speed has been measured yet.");
    if (isThere) this.draw();
  }

  draw() {
    const { seconds, step } = this.content;
    Object.entries(this.charts).forEach(([key, chart], at) => {
      const mean = this.content[key] ?? [];
      this.boxes[key].hidden = !mean.some(known);
      const x = this.along === "step" ? step : seconds;
      chart.show([{ name: chart.label, colour: ["c2", "c0", "c4"][at], x, mean }], this.along);
    });
    this.table.show(() => ({
      columns: ["step", "time", "tokens a second", "utilisation", "learning rate"],
      rows: step.map((one, at) => [count(one), duration(seconds[at]), short(this.content.tokens_per_s?.[at]),
        share(this.content.utilisation?.[at]), small(this.content.lr?.[at])]).toReversed(),
    }));
  }

  /** Says how fast the run is now, or how fast it was on average once it has ended. */
  #sentence(run) {
    const newest = (key) => this.content[key]?.findLast(known);
    const reading = (key) => (isOver(run) ? run[key] : newest(key));
    const busy = known(reading("utilisation")) ? `, computing for ${share(reading("utilisation"))} of the time` : "";
    const rate = `${short(reading("tokens_per_s"))} tokens a second${isOver(run) ? " on average" : ""}`;
    return `${rate}${busy}; learning rate ${small(newest("lr"))}${isOver(run) ? " at the end" : ""}.`;
  }
}

export class Outer {
  constructor(level) {
    this.part = new Part("Outer gradient", { level });
    this.node = this.part.node;
    this.norm = single("Norm of the mean delta, per fragment", 150, small, [0, null]);
    this.cosine = single("Cosine between workers", 150, cosine, null);
    this.table = new FoldedTable("outer gradient by step");
    this.cosineBox = titled(this.cosine, level);
    this.part.body.append(titled(this.norm, level), this.cosineBox, this.table.node);
  }

  show({ outer, run }) {
    const content = outer && byPeriod(outer, run?.period);
    const isThere = Boolean(content?.step?.length);
    this.part.reveal(isThere);
    this.part.say(isThere ? sentence(content) : "No round has been applied yet.");
    if (!isThere) return;
    const hasCosine = Boolean(content.cosine?.mean?.some(known));
    this.cosineBox.hidden = !hasCosine;
    this.norm.show([{ name: "norm", colour: "c3", x: content.step, ...content.norm }]);
    if (hasCosine) this.cosine.show([{ name: "cosine", colour: "c5", x: content.step, ...content.cosine }]);
    this.table.show(() => ({
      columns: ["step", "norm", "least", "most", "cosine", "least", "most"],
      rows: content.step.map((step, at) => [count(step), ...["norm", "cosine"].flatMap((key) =>
        ["mean", "low", "high"].map((which) => small(content[key]?.[which]?.[at])))]).toReversed(),
    }));
  }
}

function sentence({ fragments, norm, cosine: cosines }) {
  const agreed = cosines?.mean?.findLast(known);
  const parts = fragments > 1 ? ` over ${count(fragments)} fragments; the band spans them` : "";
  const words = "1: the same direction, 0: unrelated";
  const agreement = known(agreed) ? `; workers' deltas have a cosine of ${cosine(agreed)} (${words})` : "";
  return `The mean delta has a norm of ${small(norm?.mean?.findLast(known))}${parts}${agreement}.`;
}

/** Joins the rounds of a period, one for each fragment, into one point whose band spans the fragments. */
export function byPeriod(outer, period) {
  if (!(outer.fragments > 1) || !known(period) || period < 1) return outer;
  const groups = Object.values(Object.groupBy(outer.step.keys(), (at) => Math.floor(outer.step[at] / period)));
  const joined = (curve) => ({
    mean: groups.map((group) => over(group, curve.mean, mean)),
    low: groups.map((group) => over(group, curve.low, (values) => Math.min(...values))),
    high: groups.map((group) => over(group, curve.high, (values) => Math.max(...values))),
  });
  const step = groups.map((group) => outer.step[group.at(-1)]);
  return { ...outer, step, norm: joined(outer.norm), cosine: joined(outer.cosine) };
}

/** Applies a function to the numbers at some places of an array; null if there are none. */
function over(places, values, act) {
  const found = places.map((at) => values?.[at]).filter(known);
  return found.length ? act(found) : null;
}

function single(label, height, value, range) {
  return new Chart({ label, height, value, range, legend: false });
}

function titled(chart, level) {
  return element("div", { class: "small-chart" }, element(`h${level + 1}`, {}, chart.label), chart.node);
}
