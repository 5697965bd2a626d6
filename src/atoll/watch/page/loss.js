// The loss: of the anchor on held-out text, and of each worker on what it trains on.

import { Chart, ALONG } from "./chart.js";
import { colour, MOST_COLOURS } from "./colours.js";
import { choices, plain } from "./dom.js";
import { Part } from "./part.js";
import { isOver, newestLosses } from "./state.js";
import { FoldedTable } from "./table.js";
import { count, known, loss, short } from "./units.js";

/** Turns the rows of evaluations into a series. */
export function anchorSeries(rows, along, name, style) {
  const column = { step: 0, tokens: 1, seconds: 2 }[along];
  return {
    name, ...style, dots: true, x: rows.map((row) => row[column]), mean: rows.map((row) => row[3]),
    notes: rows.map((row) => (known(row[4]) && row[4] !== row[0] ? `anchor of step ${count(row[4])}` : "")),
  };
}

export class Loss {
  constructor(level) {
    this.part = new Part("Loss", { level, wide: true });
    this.node = this.part.node;
    this.along = "tokens";
    this.parts = 1; // of which the last is drawn
    this.chart = new Chart({ label: "Loss", height: 270, value: loss, logarithmic: true });
    this.table = new FoldedTable("loss, evaluation by evaluation");
    this.part.controls.append(
      choices("Along", { tokens: "Tokens", seconds: "Time", step: "Steps" }, (key) => {
        this.along = key;
        this.draw();
      }),
      choices("Range", { all: "Whole run", last: "Last quarter" }, (key) => {
        this.parts = key === "all" ? 1 : 4;
        this.draw();
      }));
    this.part.body.append(this.chart.node, this.table.node);
  }

  show(sections) {
    const isNew = this.content !== sections.loss; // the sentence alone changes with the others
    this.content = sections.loss;
    this.sections = sections;
    const workers = Object.values(this.content?.workers ?? {});
    const isThere = Boolean(this.content?.anchor?.length || workers.some((one) => one.step?.length));
    this.part.reveal(isThere);
    this.part.say(isThere ? this.#sentence() : "No loss has been logged yet.");
    if (isThere && isNew) this.draw();
  }

  draw() {
    const workers = this.#workers();
    const isFew = workers.length <= MOST_COLOURS;
    const series = workers.map(([worker, one]) => ({
      name: `worker ${worker}`,
      group: isFew ? "" : `${workers.length} workers`,
      colour: isFew ? colour(Number(worker) || 0) : "cmuted",
      style: "thin",
      x: one[this.along],
      mean: one.mean,
      low: isFew ? one.low : null,
      high: isFew ? one.high : null,
    }));
    const { anchor } = this.content;
    if (anchor?.length) series.unshift(anchorSeries(anchor, this.along, "anchor, held out", { colour: "cink" }));
    this.chart.show(this.parts > 1 ? series.map((one) => lastPart(one, series, this.parts)) : series, this.along);
    this.table.show(() => this.#rows());
  }

  /** Returns [worker, curve] in the order of the workers. */
  #workers() {
    return Object.entries(this.content.workers ?? {}).map(([worker, one]) => [plain(worker, 12), one]);
  }

  #sentence() {
    const rows = this.content.anchor ?? [];
    const last = rows.at(-1);
    if (!last) return `The anchor has not been evaluated yet.${this.#spread()}`;
    const best = rows.reduce((least, row) => (known(row[3]) && !(row[3] >= least?.[3]) ? row : least), null);
    let compared = rows.length > 1 ? `, the lowest ${isOver(this.sections.run) ? "of the run" : "so far"}` : "";
    if (best && best !== last) compared = `; the lowest was ${loss(best[3])} at step ${count(best[0])}`;
    const which = known(last[4]) ? ` of step ${count(last[4])}` : "";
    return `The anchor${which} has a held-out loss of ${loss(last[3])} nats per token${compared}.${this.#spread()}`;
  }

  /** Says which workers have the lowest and the highest loss in training. */
  #spread() {
    const { lanes, run } = this.sections;
    const ends = newestLosses(this.content, lanes, run).map(([worker, end]) => [plain(worker, 12), end]);
    const [low, ...others] = ends.filter(([, end]) => known(end)).sort((a, b) => a[1] - b[1]);
    if (!others.length) return "";
    const said = ([worker, end]) => `worker ${worker} (${loss(end)})`;
    return ` In training, ${said(low)} has the lowest loss and ${said(others.at(-1))} the highest.`;
  }

  #rows() {
    const rows = (this.content.anchor ?? []).toReversed();
    return {
      columns: ["step", "tokens", "time", "held-out loss", "anchor of step", "lowest so far"],
      rows: rows.map(([step, tokens, seconds, value, anchor, best]) =>
        [count(step), short(tokens), ALONG.seconds.value(seconds ?? 0), loss(value), count(anchor), best ? "yes" : ""]),
    };
  }
}

/** Returns the last of `parts` equal parts of a series along x. */
function lastPart(one, series, parts) {
  const end = Math.max(...series.map((other) => other.x.at(-1) ?? 0));
  const from = one.x.findIndex((x) => x >= end - end / parts);
  const cut = (values) => values && (from < 0 ? values.slice(-1) : values.slice(from));
  return { ...one, x: cut(one.x), mean: cut(one.mean), low: cut(one.low), high: cut(one.high), notes: cut(one.notes) };
}
