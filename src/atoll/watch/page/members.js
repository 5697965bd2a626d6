// Members over time: who trains, waits and is away, in the last minute and over the whole run.

import { element, plain, swatch } from "./dom.js";
import { LiveLanes } from "./live_lanes.js";
import { Part } from "./part.js";
import { RunLanes } from "./run_lanes.js";
import { isOver, presence } from "./state.js";
import { FoldedTable } from "./table.js";
import { count, duration, known, mean, NONE, share } from "./units.js";

const MOVING = ["training", "waiting for a round", "stalled", "paused"];
const LEGEND = {
  training: "training", idle: "waiting", catching: "catching up", away: "away", paused: "paused",
  rounds: "rounds on their way", joined: "joined", lost: "lost or left", view: "new view",
};

export class Members {
  /** `detail(from, to)` promises the single waits and rounds between two times, or is null on a frozen page. */
  constructor(level, detail) {
    this.part = new Part("Members", { level, wide: true });
    this.node = this.part.node;
    this.isServed = Boolean(detail);
    this.live = new LiveLanes();
    this.overview = new RunLanes(detail);
    this.table = new FoldedTable("members and their waits");
    const title = (text) => element(`h${level + 1}`, {}, text);
    const keys = Object.entries(LEGEND).map(([kind, name]) => element("li", {}, swatch(`lane ${kind}`), name));
    const { node, buttons, hint } = this.overview;
    const head = element("div", { class: "head" }, title("The whole run"), buttons);
    this.liveBox = element("div", { class: "lanes" }, title("The last minute"), this.live.node);
    this.part.body.append(element("ul", { class: "legend plain" }, ...keys), this.liveBox,
      element("div", { class: "lanes" }, head, node, hint), this.table.node);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.live.recolour();
      this.overview.recolour();
    });
  }

  show({ lanes, now, run }) {
    const isThere = Boolean(lanes?.workers?.length);
    this.part.reveal(isThere);
    this.part.say(isThere ? sentence(lanes, isOver(run)) : "No worker has begun yet.");
    if (!isThere) return;
    const isLive = Boolean(this.isServed && now && MOVING.includes(run?.state));
    this.liveBox.hidden = !isLive;
    this.live.show(isLive ? now : null, lanes);
    this.overview.show(lanes, now);
    this.table.show(() => ({
      columns: ["worker", isOver(run) ? "at the end" : "now", "trained", "waited", "changes"],
      rows: lanes.workers.map((lane) => row(lane, lanes.end_s)),
    }));
  }
}

function sentence(lanes, hasEnded) {
  const seats = lanes.workers.map((lane) => presence(lane, lanes.end_s));
  const waited = lanes.workers.map((lane) => [lane.worker, waitingShare(lane)]).filter(([, part]) => known(part));
  const [most] = waited.sort((a, b) => b[1] - a[1]);
  const waits = most ? ` Worker ${most[0]} waited most, ${share(most[1])} of its time.` : "";
  if (hasEnded) return `${count(seats.length)} ${seats.length === 1 ? "worker" : "workers"} took part.${waits}`;
  const others = seats.filter(({ kind }) => kind !== "training").slice(0, 4);
  const words = others.map(({ worker, kind, since }) => `; worker ${worker} is ${kind}${since ? ` (${since})` : ""}`);
  return `${seats.filter(({ kind }) => kind === "training").length} of ${seats.length} train${words.join("")}.${waits}`;
}

function row(lane, end) {
  const training = (lane.spans ?? []).filter(([, , kind]) => kind === "training");
  const trained = training.reduce((sum, [begin, until]) => sum + until - begin, 0);
  const marks = (lane.marks ?? []).slice(-6);
  const changes = marks.map(([at, kind, words]) => `${duration(at)}: ${plain(words || kind, 120)}`).join("; ");
  const { kind, since } = presence(lane, end);
  const waited = share(waitingShare(lane));
  return [count(lane.worker), `${kind} ${since}`.trim(), duration(trained), waited, changes || NONE];
}

const waitingShare = (lane) => mean(lane.waiting ?? []);
