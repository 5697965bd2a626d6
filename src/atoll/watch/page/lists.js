// Lists of words: faults, samples of text, scores on tasks, settings.

import { element, plain, span } from "./dom.js";
import { Part } from "./part.js";
import { isOver } from "./state.js";
import { table } from "./table.js";
import { count, duration, known } from "./units.js";

/** Settings with which a run writes no samples. */
const NO_SAMPLES = new Map([["log.sample", "0"], ["train.parallel", "fsdp"]]);
const GRAVE = ["lost", "rolled back", "guarded"];

/** Replaces the content of a list only if it changed: what is open, selected or focused stays so. */
class List {
  constructor(title, level, options) {
    this.part = new Part(title, { level, ...options });
    this.node = this.part.node;
  }

  show(sections) {
    const content = this.pick(sections);
    const key = JSON.stringify(content ?? null);
    if (key === this.seen) return;
    this.seen = key;
    this.part.say(this.sentence(content));
    const nodes = this.nodes(content);
    this.part.body.replaceChildren(...nodes);
    this.part.reveal(nodes.length > 0);
    this.node.hidden = this.isHidden(content);
  }

  isHidden() {
    return false;
  }
}

export class Faults extends List {
  /** The list scrolls on a page that is served, and is as long as it is on a frozen one. */
  constructor(level, isServed) {
    super("Faults", level);
    this.isServed = isServed;
  }

  pick({ faults, run }) {
    return { ...faults, isOver: isOver(run) };
  }

  sentence({ count: all, latest = [], isOver: isAll }) {
    if (!all) return isAll ? "None." : "None so far.";
    const below = latest.length < all ? `, the latest ${count(latest.length)} below` : "";
    return `${count(all)} ${isAll ? "in all" : "so far"}${below}.`;
  }

  nodes({ latest = [] }) {
    if (!latest.length) return [];
    const items = latest.map(({ at_s, step, worker, kind, words }) => element("li", {},
      span("when", known(at_s) ? `after ${duration(at_s)}` : `step ${count(step)}`),
      span(GRAVE.includes(kind) ? "tag grave" : "tag", plain(kind, 20)),
      span("what", known(worker) ? `worker ${worker}, step ${count(step)}: ` : "",
        element("bdi", {}, plain(words, 500)))));
    const list = element("ul", { class: "faults" }, ...items);
    if (!this.isServed) return [list];
    const scrolled = { class: "scroll tall", role: "region", "aria-label": "List of faults", tabindex: "0" };
    return [element("div", scrolled, list)];
  }
}

export class Samples extends List {
  constructor(level) {
    super("Samples", level);
  }

  pick({ samples, settings, run }) {
    const isOff = settings?.some(([key, value]) => NO_SAMPLES.get(key) === value);
    return { samples: samples ?? [], isAwaited: !isOff && !isOver(run) };
  }

  sentence({ samples, isAwaited }) {
    if (!samples.length && isAwaited) return "No sample of text is there yet: one comes with each evaluation.";
    if (!samples.length) return "This run writes no samples of text.";
    return "How the outer parameters continue a held-out text at each evaluation, newest first.";
  }

  nodes({ samples }) {
    const [first, ...older] = samples.map(({ step, prompt, text }) => element("figure", { class: "sample" },
      element("figcaption", {}, `step ${count(step)}`),
      element("blockquote", {}, element("bdi", { class: "prompt" }, plain(prompt, 4000)),
        element("bdi", {}, plain(text, 4000)))));
    if (!older.length) return first ? [first] : [];
    const summary = element("summary", {}, `${older.length} earlier`);
    return [first, element("details", { class: "folded" }, summary, ...older)];
  }
}

export class Scores extends List {
  constructor(level) {
    super("Accuracy on tasks", level);
  }

  pick({ scores }) {
    return scores;
  }

  sentence() {
    return "By atoll eval, the newest score of each task; chance is the accuracy of random guesses.";
  }

  nodes(scores) {
    const rows = (scores ?? []).map((row) => row.map((cell) => plain(cell, 120)));
    return rows.length ? [table(["task", "documents", "accuracy", "chance"], rows, "Scores of tasks")] : [];
  }

  isHidden(scores) {
    return !scores?.length;
  }
}

export class Settings extends List {
  constructor(level, isServed) {
    super("Settings", level, { wide: true });
    this.isServed = isServed;
  }

  pick({ settings }) {
    return settings;
  }

  sentence(settings) {
    if (settings?.length) return "";
    const where = this.isServed ? " here: they are in the run file on the workers' machines" : "";
    return `The settings are not known${where}.`;
  }

  nodes(settings) {
    if (!settings?.length) return [];
    const rows = settings.map(([key, value]) => element("div", {},
      element("dt", {}, plain(key, 120)),
      element("dd", {}, element("bdi", {}, plain(value, 2000)))));
    const summary = element("summary", {}, `${count(settings.length)} settings`);
    return [element("details", { class: "folded" }, summary, element("dl", { class: "settings" }, ...rows))];
  }
}
