// The connection to the server: sections as they change, and since when there is none.

import { element, setText } from "./dom.js";
import { hour } from "./units.js";

const AGAIN_MS = 3000;

export class Connection {
  /** `show` gets the sections of every message. */
  constructor(show) {
    this.show = show;
    this.lostAt = null;
    this.node = element("p", { class: "connection" }, "connecting");
    this.#open();
  }

  #open() {
    this.source = new EventSource("updates");
    this.source.addEventListener("sections", (event) => {
      this.#say(null);
      this.show(JSON.parse(event.data));
    });
    this.source.onopen = () => this.#say(null);
    this.source.onerror = () => {
      // The browser connects again by itself unless the server answered with an error.
      const isRefused = this.source.readyState === EventSource.CLOSED;
      this.#say(this.lostAt ?? Date.now() / 1000, isRefused);
      if (isRefused) setTimeout(() => this.#open(), AGAIN_MS);
    };
  }

  #say(lostAt, isRefused = false) {
    this.lostAt = lostAt;
    this.node.classList.toggle("lost", lostAt !== null);
    setText(this.node, lostAt === null ? "live" : words(hour(lostAt, true), isRefused));
    document.body.classList.toggle("stale", lostAt !== null);
  }
}

function words(since, isRefused) {
  if (!isRefused) return `disconnected since ${since}, connecting again`;
  return `refused since ${since} (too many viewers, or another token): open the address that atoll watch printed`;
}

/** Promises the single waits and rounds of all workers between two times, in seconds since the run began. */
export async function detail(from, to) {
  const answer = await fetch(`lanes?from=${from.toFixed(3)}&to=${to.toFixed(3)}`);
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}
