// The first screen: is it training, how long still, what loss, which workers are there.

import { colour } from "./colours.js";
import { element, plain, setText, span, swatch } from "./dom.js";
import { count, duration, hour, known, loss, mean, share, short } from "./units.js";

/** For each state a word, and a class that gives its mark a shape and a colour. */
const STATES = new Map(Object.entries({
  "reading": ["Reading", "waits"],
  "waiting to begin": ["Waiting to begin", "waits"],
  "training": ["Training", "good"],
  "waiting for a round": ["Waiting for a round", "waits"],
  "stalled": ["Stalled", "bad"],
  "paused": ["Paused", "waits"],
  "finished": ["Finished", "done"],
  "interrupted": ["Interrupted", "bad"],
  "failed": ["Failed", "bad"],
  "silent": ["Silent", "bad"],
}));
const KINDS = ["training", "catching up", "away", "paused", "gone"];
const MOST_CHIPS = 64;
const ENDING_S = 10; // when a run ends, its workers leave one after another

export class State {
  constructor(level) {
    this.name = element(`h${level}`, { class: "name" });
    this.facts = element("p", { class: "facts" });
    this.mark = element("span", { class: "mark", "aria-hidden": "true" });
    this.word = element("span", { role: "status" });
    this.words = element("p", { class: "words" });
    this.bar = element("div", {
      class: "bar", role: "progressbar", "aria-label": "Steps done", "aria-valuemin": "0", "aria-valuemax": "100",
    }, element("i"));
    this.progress = element("p", { class: "progress" });
    this.time = new Figure("Time left");
    this.loss = new Figure("Held-out loss");
    this.workers = new Figure("Workers");
    this.speed = new Figure("Speed");
    this.computing = new Figure("Computing");
    this.chips = element("ul", { class: "chips", "aria-label": "Workers now" });
    const figures = [this.time, this.loss, this.workers, this.speed, this.computing].map(({ node }) => node);
    this.node = element("header", { class: "state" }, this.name, this.facts,
      element("div", { class: "now" }, element("p", { class: "word" }, this.mark, this.word), this.words),
      element("div", { class: "done" }, this.bar, this.progress),
      element("dl", { class: "figures" }, ...figures), this.chips);
  }

  show({ run, loss: losses, lanes }) {
    const about = run ?? {};
    const [word, kind] = STATES.get(about.state) ?? [plain(about.state ?? "Connecting", 40), "waits"];
    const since = known(about.since) ? ` Since ${hour(about.since)}.` : "";
    setText(this.name, plain(about.name || "A run", 120));
    setText(this.facts, facts(about));
    setText(this.word, word);
    setText(this.words, plain(about.state_words, 800) + since);
    this.mark.className = `mark ${kind}`;
    this.isOver = isOver(about);
    this.#progress(about);
    this.#figures(about, losses, lanes);
    this.#workers(about, lanes);
  }

  #progress(run) {
    const isReading = run.state === "reading";
    const done = (isReading ? run.read : run.step / run.steps) || 0;
    const took = `${duration(run.seconds)}${this.isOver ? "" : " so far"}`;
    this.bar.firstChild.style.width = `${100 * Math.min(1, Math.max(0, done))}%`;
    this.bar.setAttribute("aria-valuenow", String(Math.floor(100 * done)));
    setText(this.progress, isReading ? `${share(done)} of the events read` :
      `Step ${count(run.step)} of ${count(run.steps)}, ${share(done)} · ${short(run.tokens)} tokens · ${took}`);
  }

  #figures(run, losses, lanes) {
    const ending = known(run.ends_at) ? `done at ${hour(run.ends_at)}` : "not known yet";
    if (this.isOver) this.time.show("It took", duration(run.seconds), "");
    else this.time.show("Time left", duration(run.left_s), ending);
    const last = losses?.anchor?.at(-1);
    const trained = mean(newestLosses(losses, lanes, run).map(([, value]) => value));
    const which = known(last?.[4]) ? `anchor of step ${count(last[4])}` : `at step ${count(last?.[0])}`;
    if (last) this.loss.show("Held-out loss", loss(last[3]), which);
    else this.loss.show("Training loss", loss(trained), known(trained) ? "mean of the workers" : "");
    this.speed.show("Speed", short(run.tokens_per_s), this.isOver ? "tokens a second, mean" : "tokens a second");
    this.computing.show("Computing", share(run.utilisation), "of the workers' time");
  }

  #workers(run, lanes) {
    const seats = (lanes?.workers ?? []).map((lane) => presence(lane, lanes.end_s));
    this.chips.hidden = this.isOver || !seats.length;
    if (this.isOver || !seats.length) {
      this.workers.show("Workers", count(seats.length || run.workers), this.isOver ? "took part" : "");
      return;
    }
    const away = seats.filter(({ kind }) => kind === "away" || kind === "gone").map(({ worker }) => worker);
    const there = seats.filter(({ kind }) => kind === "training" || kind === "catching up").length;
    const without = `without ${away.slice(0, 3).join(", ")}${away.length > 3 ? ", …" : ""}`;
    this.workers.show("Workers", `${there} of ${seats.length}`, away.length ? without : "all there");
    const key = JSON.stringify(seats);
    if (key === this.seen) return;
    this.seen = key;
    this.chips.replaceChildren(...seats.slice(0, MOST_CHIPS).map(chip));
    const more = seats.length - MOST_CHIPS;
    if (more > 0) this.chips.append(element("li", { class: "chip" }, `and ${more} more`));
  }
}

/** Shows one number with a title above and a few words below. */
class Figure {
  constructor(title) {
    this.title = element("dt", {}, title);
    this.value = element("b");
    this.note = element("span");
    this.node = element("div", {}, this.title, element("dd", {}, this.value, this.note));
  }

  show(title, value, note) {
    setText(this.title, title);
    setText(this.value, value);
    setText(this.note, note);
  }
}

/** Returns whether a run has ended. */
export const isOver = (run) => ["finished", "interrupted", "failed"].includes(run?.state);

/** Returns whether a worker trains at the end of its lane; without a lane nothing says that it does not. */
export function isTraining(worker, lanes, run) {
  const lane = lanes?.workers?.find((one) => one.worker === worker);
  if (!lane) return true;
  const last = lane.spans?.findLast(([, , kind]) => kind === "training");
  return Boolean(last) && (last === lane.spans.at(-1) || (isOver(run) && last[1] >= lanes.end_s - ENDING_S));
}

/** Returns [worker, newest training loss] of the workers that train; of all if none does. */
export function newestLosses(losses, lanes, run) {
  const all = Object.entries(losses?.workers ?? {}).map(([worker, one]) => [worker, one.mean.findLast(known)]);
  const found = all.filter(([worker]) => isTraining(Number(worker), lanes, run));
  return found.length ? found : all;
}

/** Returns what a worker does at the end of its lane, and since when unless it trains. */
export function presence(lane, end) {
  const last = lane.spans?.at(-1);
  if (!last || !KINDS.includes(last[2])) return { worker: lane.worker, kind: "gone", since: "" };
  const [begin, until, what] = last;
  const kind = what === "training" && until < end - 1 ? "gone" : what;
  const since = Math.max(1, Math.round(end - (kind === what ? begin : until)));
  return { worker: lane.worker, kind, since: kind === "training" ? "" : duration(since) };
}

function chip({ worker, kind, since }) {
  return element("li", { class: `chip ${kind.replaceAll(" ", "-")}` },
    swatch(`round ${colour(worker)}`), span("", `worker ${worker}`), span("kind", `${kind} ${since}`.trim()));
}

function facts(run) {
  const found = [
    run.method,
    run.workers ? `${count(run.workers)} ${run.workers === 1 ? "worker" : "workers"}` : "",
    run.parameters ? `${short(run.parameters)} parameters` : "",
    run.period ? `period ${count(run.period)}` : "",
    delays((run.delay ?? []).filter(known)),
    run.codec,
    run.device,
  ];
  return found.filter(Boolean).map((fact) => plain(fact, 60)).join(" · ");
}

/** Says the delay of all workers, or the least and the most. */
function delays(steps) {
  const [least, most] = [Math.min(...steps), Math.max(...steps)];
  if (!(most > 0)) return "";
  return least === most ? `delay ${count(most)}` : `delay ${count(least)} to ${count(most)}`;
}
