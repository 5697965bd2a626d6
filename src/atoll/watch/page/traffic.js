// What travels: bytes and rate per pair of workers against the line's capacity, beside the plan and data-parallel.

import { element, plain, setText } from "./dom.js";
import { Part } from "./part.js";
import { FoldedTable, table } from "./table.js";
import { bytes, count, duration, known, rate, share } from "./units.js";

const MOST_PAIRS = 12;

export class Traffic {
  constructor(level) {
    this.part = new Part("Traffic", { level, wide: true });
    this.node = this.part.node;
    this.pairs = element("ul", { class: "pairs" });
    this.note = element("p", { class: "hint" });
    this.title = element("p", { class: "hint" }, "Rate now, of what each line was measured to carry:");
    this.workers = element("div");
    this.compared = element("div", { class: "compared" });
    this.table = new FoldedTable("every pair of workers");
    this.part.body.append(this.compared, element("div", { class: "halves" }, this.workers, element("div", {}, this.title, this.pairs, this.note)), this.table.node);
  }

  show({ traffic, run }) {
    const workers = traffic?.workers ?? [];
    const pairs = traffic?.pairs ?? [];
    const isThere = workers.some((one) => one.sent_bytes || one.payload_bytes);
    this.part.reveal(isThere);
    this.part.say(isThere ? sentence(traffic) : "Nothing has been sent yet.");
    if (!isThere) return;
    this.#compare(traffic, workers);
    this.#workers(workers);
    const busiest = pairs.toSorted((a, b) => (b.rate ?? 0) - (a.rate ?? 0)).slice(0, MOST_PAIRS);
    this.pairs.replaceChildren(...busiest.toSorted((a, b) => a.from - b.from || a.to - b.to).map((pair) => line(pair)));
    this.pairs.hidden = this.title.hidden = !pairs.length;
    setText(this.note, !pairs.length ? (run?.workers > 1 ? "This run's link does not measure the lines between pairs of workers." : "") :
      pairs.length > MOST_PAIRS ? `The ${MOST_PAIRS} busiest of ${count(pairs.length)} pairs.` : "");
    this.table.node.hidden = !pairs.length;
    this.table.show(() => ({
      columns: ["pair", "sent", "rate now", "capacity", "in use", "measured"],
      rows: pairs.map((pair) => [`${pair.from} → ${pair.to}`, bytes(pair.sent_bytes), rate(pair.rate), rate(pair.capacity),
        share(pair.capacity ? pair.rate / pair.capacity : null), known(pair.at_s) ? `after ${duration(pair.at_s)}` : "–"]),
    }));
  }

  #compare(traffic, workers) {
    const sent = payload(workers);
    const whole = traffic.data_parallel_bytes;
    this.compared.hidden = !known(whole) || !whole;
    if (this.compared.hidden) return;
    const most = Math.max(sent, whole);
    this.compared.replaceChildren(amount("this run", sent, most, "c0"), amount("data-parallel", whole, most, "cmuted"));
  }

  #workers(workers) {
    const isWired = total(workers) > 0; // inside one process nothing is on a wire
    const columns = isWired ? ["worker", "sent", "received", "rate now"] : ["worker", "payloads"];
    const isPlanned = workers.some((one) => known(one.planned_rate));
    if (isPlanned) columns.push("planned");
    const made = table(columns, workers.map((one) => [count(one.worker), ...(isWired ? [bytes(one.sent_bytes), bytes(one.received_bytes), rate(one.rate)] : [bytes(one.payload_bytes)]), ...(isPlanned ? [rate(one.planned_rate)] : [])]),
      { label: "Bytes and rate of each worker" });
    const before = this.workers.firstChild;
    if (before) before.replaceChildren(...made.childNodes);
    else this.workers.append(made);
  }
}

const total = (workers) => workers.reduce((sum, one) => sum + (one.sent_bytes || 0), 0);

/** Returns the bytes of payloads that a worker has sent, mean. */
const payload = (workers) => workers.reduce((sum, one) => sum + (one.payload_bytes || 0), 0) / Math.max(1, workers.length);

function sentence(traffic) {
  const sent = payload(traffic.workers);
  const onWire = total(traffic.workers);
  const whole = traffic.data_parallel_bytes;
  const times = known(whole) && sent ? whole / sent : null;
  const fewer = known(times) && times > 1.05 ? `, ${times >= 10 ? count(Math.round(times)) : times.toFixed(1)} times fewer than data-parallel would have` : "";
  const { planned } = traffic;
  const foretold = planned ? ` The plan: ${plain(planned.words ?? "", 200) || [known(planned.bytes_per_s) ? `${rate(planned.bytes_per_s)} a worker` : "", known(planned.utilisation) ? `computing for ${share(planned.utilisation)} of the time` : ""].filter(Boolean).join(", ")}.` : "";
  return `A worker has sent ${bytes(sent)} of payloads${fewer}${onWire ? `; all workers together have put ${bytes(onWire)} on the wire` : ""}.${foretold.replace("..", ".")}`;
}

/** Returns a bar of bytes on a linear scale with its number beside it. */
function amount(name, value, most, colour) {
  const bar = element("i", { class: colour });
  bar.style.width = `${Math.max(0.3, 100 * value / most)}%`;
  return element("p", { class: "amount" }, element("span", {}, name), element("span", { class: "track" }, bar), element("b", {}, bytes(value)));
}

/** Returns one pair: a track as long as the line's capacity, filled as far as it is in use. */
function line(pair) {
  const fill = element("i", { class: `c${pair.from % 8}` });
  const used = pair.capacity ? pair.rate / pair.capacity : null;
  fill.style.width = `${100 * Math.min(1, Math.max(0, used ?? 0))}%`;
  const limit = element("span", { class: "limit" }, pair.capacity ? ` of ${rate(pair.capacity)}` : ", not measured");
  return element("li", {}, element("span", { class: "pair" }, `${pair.from} → ${pair.to}`), element("span", { class: pair.capacity ? "track" : "track unknown", "aria-hidden": "true" }, fill), element("span", { class: "rate" }, rate(pair.rate), limit));
}
