// Lists of words: faults, samples of text, scores on tasks, settings.

import { element, plain } from "./dom.js";
import { Part } from "./part.js";
import { table } from "./table.js";
import { count, duration, known } from "./units.js";

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
  constructor(level) {
    super("Faults", level);
  }

  pick({ faults }) {
    return faults;
  }

  sentence(faults) {
    if (!faults?.count) return "None so far.";
    const shown = faults.latest?.length ?? 0;
    return shown < faults.count ? `${count(faults.count)} so far, the latest ${count(shown)} below.` : `${count(faults.count)} so far.`;
  }

  nodes(faults) {
    const latest = faults?.latest ?? [];
    if (!latest.length) return [];
    const items = latest.map(({ at_s, step, worker, kind, words }) => element("li", {},
      element("span", { class: "when" }, known(at_s) ? `after ${duration(at_s)}` : `step ${count(step)}`),
      element("span", { class: `tag ${["lost", "rolled back", "guarded"].includes(kind) ? "grave" : ""}` }, plain(kind, 20)),
      element("span", { class: "what" }, known(worker) ? `worker ${worker}, step ${count(step)}: ` : "", element("bdi", {}, plain(words, 500)))));
    return [element("div", { class: "scroll tall", role: "region", "aria-label": "Faults", tabindex: "0" }, element("ul", { class: "faults" }, ...items))];
  }
}

export class Samples extends List {
  constructor(level) {
    super("Samples", level);
  }

  pick({ samples }) {
    return samples;
  }

  sentence(samples) {
    return samples?.length ? "Text that the outer parameters write at each evaluation, newest first." : "This run writes no samples of text.";
  }

  nodes(samples) {
    const [first, ...older] = (samples ?? []).map(({ step, text }) => element("figure", { class: "sample" }, element("figcaption", {}, `step ${count(step)}`), element("blockquote", {}, element("bdi", {}, plain(text, 4000)))));
    if (!first) return [];
    return older.length ? [first, element("details", { class: "folded" }, element("summary", {}, `${older.length} earlier`), ...older)] : [first];
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
    return "By atoll eval, the newest score of each task.";
  }

  /** Scores are {task: text}, or a list of rows of text. */
  nodes(scores) {
    const rows = Array.isArray(scores) ? scores : Object.entries(scores ?? {});
    return rows.length ? [table(["task", "accuracy"], rows.map((row) => row.map((cell) => plain(cell, 120))), { label: "Accuracy on tasks" })] : [];
  }

  isHidden(scores) {
    return !this.nodes(scores).length;
  }
}

export class Settings extends List {
  constructor(level) {
    super("Settings", level, { wide: true });
  }

  pick({ settings }) {
    return settings;
  }

  sentence(settings) {
    return settings?.length ? "" : "The settings are not known.";
  }

  nodes(settings) {
    if (!settings?.length) return [];
    const rows = settings.map(([key, value]) => element("div", {}, element("dt", {}, plain(key, 120)), element("dd", {}, element("bdi", {}, plain(value, 2000)))));
    return [element("details", { class: "folded" }, element("summary", {}, `${count(settings.length)} settings`), element("dl", { class: "settings" }, ...rows))];
  }
}
