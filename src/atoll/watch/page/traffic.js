// What travels: bytes and rate per pair of workers against the line's capacity, beside the plan and data-parallel.

import { colour } from "./colours.js";
import { element, plain, setText, span } from "./dom.js";
import { Part } from "./part.js";
import { isOver, isTraining } from "./state.js";
import { FoldedTable, table } from "./table.js";
import { bytes, count, duration, known, mean, NONE, rate, share } from "./units.js";

const MOST_PAIRS = 12;

export class Traffic {
  constructor(level) {
    this.part = new Part("Traffic", { level, wide: true });
    this.node = this.part.node;
    this.compared = element("div", { class: "compared" });
    this.workers = element("div");
    this.title = element("p", { class: "hint" });
    this.pairs = element("ul", { class: "pairs" });
    this.note = element("p", { class: "hint" });
    this.table = new FoldedTable("every pair of workers");
    const right = element("div", {}, this.title, this.pairs, this.note);
    this.part.body.append(this.compared, element("div", { class: "halves" }, this.workers, right), this.table.node);
  }

  show({ traffic, lanes, run }) {
    const isThereNow = (worker) => run?.state !== "silent" && isTraining(worker, lanes, run);
    const workers = (traffic?.workers ?? []).map((one) => (isThereNow(one.worker) ? one : { ...one, rate: null }));
    const pairs = (traffic?.pairs ?? []).map((pair) =>
      (isThereNow(pair.from) && isThereNow(pair.to) ? pair : { ...pair, rate: null }));
    const isThere = workers.some((one) => one.sent_bytes || one.payload_bytes);
    this.part.reveal(isThere);
    this.part.say(isThere ? sentence(traffic) : "Nothing has been sent yet.");
    if (!isThere) return;
    this.#compare(payload(workers), traffic.data_parallel_bytes);
    this.when = isOver(run) ? "at the end" : "now";
    this.#workers(workers, traffic.planned?.bytes_per_s);
    this.#pairs(pairs, run?.workers);
  }

  /** Draws what a worker has sent beside what it would have sent in data-parallel training, on one linear scale. */
  #compare(sent, whole) {
    this.compared.hidden = !known(whole) || !whole;
    const most = Math.max(sent, whole);
    this.compared.replaceChildren(amount("this run", sent, most, "c0"), amount("data-parallel", whole, most, "cmuted"));
  }

  #workers(workers, planned) {
    const isWired = onWire(workers) > 0; // inside one process nothing is on a wire
    const columns = {
      worker: (one) => count(one.worker),
      ...(isWired ? {} : { payloads: (one) => bytes(one.payload_bytes) }),
      ...(isWired && { sent: (one) => bytes(one.sent_bytes), received: (one) => bytes(one.received_bytes) }),
      ...(isWired && { [`rate ${this.when}`]: (one) => rate(one.rate) }),
      ...(known(planned) && { planned: () => rate(planned) }),
    };
    const rows = workers.map((one) => Object.values(columns).map((cell) => cell(one)));
    const made = table(Object.keys(columns), rows, "Bytes and rate of each worker");
    const before = this.workers.firstChild;
    if (before) before.replaceChildren(...made.childNodes);
    else this.workers.append(made);
  }

  #pairs(pairs, workers) {
    const busiest = pairs.toSorted((a, b) => (b.rate ?? 0) - (a.rate ?? 0)).slice(0, MOST_PAIRS);
    this.pairs.replaceChildren(...busiest.toSorted((a, b) => a.from - b.from || a.to - b.to).map(line));
    this.pairs.hidden = this.title.hidden = this.table.node.hidden = !pairs.length;
    let note = "";
    if (!pairs.length && workers > 1) note = "This run's link does not measure the lines between pairs of workers.";
    if (pairs.length > MOST_PAIRS) note = `The ${MOST_PAIRS} busiest of ${count(pairs.length)} pairs.`;
    setText(this.note, note);
    setText(this.title, `Rate ${this.when}, as a share of the line's measured capacity:`);
    this.table.show(() => ({
      columns: ["pair", "sent", `rate ${this.when}`, "capacity", "in use", "measured"],
      rows: pairs.map((pair) => {
        const measured = known(pair.at_s) ? `after ${duration(pair.at_s)}` : NONE;
        const rates = [rate(pair.rate), rate(pair.capacity), share(inUse(pair))];
        return [`${pair.from} → ${pair.to}`, bytes(pair.sent_bytes), ...rates, measured];
      }),
    }));
  }
}

const onWire = (workers) => workers.reduce((sum, one) => sum + (one.sent_bytes || 0), 0);

/** Returns the bytes of payloads that a worker has sent, mean. */
const payload = (workers) => mean(workers.map((one) => one.payload_bytes || 0));

const inUse = ({ rate: now, capacity }) => (known(now) && capacity ? now / capacity : null);

function sentence({ workers, data_parallel_bytes: whole, planned }) {
  const sent = payload(workers);
  const times = sent ? whole / sent : 0;
  const said = times >= 10 ? count(Math.round(times)) : times.toFixed(1);
  const fewer = times > 1.05 ? `, ${said} times fewer than data-parallel would have` : "";
  const wire = onWire(workers) ? `; all workers together have put ${bytes(onWire(workers))} on the wire` : "";
  const plan = planned ? ` The plan: ${plain(planned.words, 200)}.` : "";
  return `A worker has sent ${bytes(sent)} of payloads${fewer}${wire}.${plan}`;
}

function amount(name, value, most, kind) {
  const bar = element("i", { class: kind });
  bar.style.width = `${Math.max(0.3, 100 * value / most)}%`;
  return element("p", { class: "amount" }, span("", name), span("track", bar), element("b", {}, bytes(value)));
}

/** Returns one pair: a track as long as the line's capacity, filled as far as it is in use. */
function line(pair) {
  const fill = element("i", { class: colour(pair.from) });
  fill.style.width = `${100 * Math.min(1, Math.max(0, inUse(pair) ?? 0))}%`;
  const limit = span("limit", pair.capacity ? ` of ${rate(pair.capacity)}` : ", not measured");
  const track = element("span", { class: pair.capacity ? "track" : "track unknown", "aria-hidden": "true" }, fill);
  return element("li", {}, span("pair", `${pair.from} → ${pair.to}`), track, span("rate", rate(pair.rate), limit));
}
