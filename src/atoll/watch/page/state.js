// The first screen: is it training, how long still, what loss, which workers are there.

import { element, plain, setText } from "./dom.js";
import { colour } from "./loss.js";
import { count, duration, hour, known, loss, NONE, share, short } from "./units.js";

/** For each state a word, and a class that gives its mark a shape and a colour. */
const STATES = new Map(Object.entries({
  "reading": ["Reading", "waits"], "waiting to begin": ["Waiting to begin", "waits"], "training": ["Training", "good"],
  "waiting for a round": ["Waiting for a round", "waits"], "stalled": ["Stalled", "bad"], "paused": ["Paused", "waits"],
  "finished": ["Finished", "done"], "interrupted": ["Interrupted", "bad"], "silent": ["Silent", "bad"],
}));
const KINDS = ["training", "catching up", "away", "paused", "gone"];
const MOST_CHIPS = 64;

export class State {
  constructor(level) {
    this.name = element(`h${level}`, { class: "name" });
    this.facts = element("p", { class: "facts" });
    this.mark = element("span", { class: "mark", "aria-hidden": "true" });
    this.word = element("span", { role: "status" });
    this.words = element("p", { class: "words" });
    this.bar = element("div", { class: "bar", role: "progressbar", "aria-label": "Steps done", "aria-valuemin": "0", "aria-valuemax": "100" }, element("i"));
    this.progress = element("p", { class: "progress" });
    this.figures = Object.fromEntries(["Time left", "Held-out loss", "Workers", "Speed", "Computing"].map((name) => [name, figure(name)]));
    this.chips = element("ul", { class: "chips", "aria-label": "Workers now" });
    this.node = element("header", { class: "state" }, this.name, this.facts,
      element("div", { class: "now" }, element("p", { class: "word" }, this.mark, this.word), this.words),
      element("div", { class: "done" }, this.bar, this.progress),
      element("dl", { class: "figures" }, ...Object.values(this.figures).map(({ node }) => node)), this.chips);
  }

  show({ run = {}, loss: losses, lanes }) {
    const [word, kind] = STATES.get(run.state) ?? [plain(run.state ?? "Connecting", 40), "waits"];
    setText(this.name, plain(run.name || "A run", 120));
    setText(this.facts, facts(run));
    setText(this.word, word);
    const since = known(run.since) ? ` Since ${hour(run.since)}.` : "";
    setText(this.words, plain(run.state_words, 800) + since);
    this.mark.className = `mark ${kind}`;
    this.#progress(run);
    this.#figures(run, losses);
    this.#workers(run, lanes);
  }

  #progress(run) {
    const isReading = run.state === "reading";
    const done = isReading ? run.read : run.steps ? run.step / run.steps : null;
    this.bar.firstChild.style.width = `${100 * Math.min(1, Math.max(0, known(done) ? done : 0))}%`;
    this.bar.setAttribute("aria-valuenow", String(Math.floor(100 * (known(done) ? done : 0))));
    setText(this.progress, isReading ? `${share(done)} of the events read` :
      `Step ${count(run.step)} of ${count(run.steps)}, ${share(done)} · ${short(run.tokens)} tokens · ${duration(run.seconds)}${run.state === "finished" ? "" : " so far"}`);
  }

  #figures(run, losses) {
    const isOver = run.state === "finished" || run.state === "interrupted";
    this.figures["Time left"].set(isOver ? duration(run.seconds) : duration(run.left_s),
      isOver ? "" : known(run.ends_at) ? `done at ${hour(run.ends_at)}` : "not known yet", isOver ? "It took" : "Time left");
    const last = losses?.anchor?.at(-1);
    const trained = Object.values(losses?.workers ?? {}).map((one) => one.mean.findLast(known)).filter(known);
    if (last) this.figures["Held-out loss"].set(loss(last[3]), known(last[4]) ? `anchor of step ${count(last[4])}` : `at step ${count(last[0])}`, "Held-out loss");
    else this.figures["Held-out loss"].set(trained.length ? loss(trained.reduce((a, b) => a + b) / trained.length) : NONE, trained.length ? "mean of the workers" : "", "Training loss");
    this.figures.Speed.set(short(run.tokens_per_s), "tokens a second");
    this.figures.Computing.set(share(run.utilisation), "of the workers' time");
  }

  #workers(run, lanes) {
    const seats = (lanes?.workers ?? []).map((lane) => presence(lane, lanes.end_s));
    const isOver = run.state === "finished" || run.state === "interrupted";
    const there = seats.filter(({ kind }) => kind === "training" || kind === "catching up").length;
    const away = seats.filter(({ kind }) => kind === "away" || kind === "gone");
    this.figures.Workers.set(!seats.length ? count(run.workers) : isOver ? count(seats.length) : `${there} of ${seats.length}`,
      isOver ? "took part" : away.length ? `without ${away.slice(0, 3).map(({ worker }) => worker).join(", ")}${away.length > 3 ? ", …" : ""}` : seats.length ? "all there" : "");
    this.chips.hidden = isOver || !seats.length;
    const key = JSON.stringify(seats);
    if (key === this.seen) return;
    this.seen = key;
    this.chips.replaceChildren(...seats.slice(0, MOST_CHIPS).map(({ worker, kind, since }) => element("li", { class: `chip ${kind.replaceAll(" ", "-")}` },
      element("span", { class: `key round ${colour(worker)}`, "aria-hidden": "true" }), element("span", {}, `worker ${worker}`), element("span", { class: "kind" }, `${kind}${since}`))));
    if (seats.length > MOST_CHIPS) this.chips.append(element("li", { class: "chip" }, `and ${seats.length - MOST_CHIPS} more`));
  }
}

/** Returns what a worker does at the end of its lane, and since when unless it trains. */
export function presence(lane, end) {
  const last = lane.spans?.at(-1);
  if (!last || !KINDS.includes(last[2])) return { worker: lane.worker, kind: "gone", since: "" };
  const kind = last[1] < end - 1 && last[2] === "training" ? "gone" : last[2];
  const since = kind === "training" ? "" : ` ${duration(Math.max(1, Math.round(end - last[kind === "gone" ? 1 : 0])))}`;
  return { worker: lane.worker, kind, since };
}

function facts(run) {
  const found = [
    run.method, run.workers ? `${count(run.workers)} ${run.workers === 1 ? "worker" : "workers"}` : "", run.parameters ? `${short(run.parameters)} parameters` : "",
    run.period ? `period ${count(run.period)}` : "", delays(run.delay), run.codec, run.device,
  ];
  return found.filter(Boolean).map((fact) => plain(fact, 60)).join(" · ");
}

/** Says the delay of all workers, or the least and the most. */
function delays(list) {
  const found = [list ?? []].flat().filter(known);
  const [least, most] = [Math.min(...found), Math.max(...found)];
  return !found.length || most === 0 ? "" : least === most ? `delay ${count(most)}` : `delay ${count(least)} to ${count(most)}`;
}

function figure(name) {
  const label = element("dt", {}, name);
  const value = element("b");
  const note = element("span");
  const node = element("div", {}, label, element("dd", {}, value, note));
  return { node, set(text, words = "", title = name) { setText(label, title); setText(value, text); setText(note, words); } };
}
