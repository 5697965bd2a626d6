// Chooses round numbers for axes.

const TIMES = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
  3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000, 1728000, 4320000, 8640000];

/** Returns about `most` round numbers between two values, and the distance between them. */
export function roundTicks(low, high, most) {
  const rough = (high - low) / (most + 0.99) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((n) => n * power >= rough) ?? 10);
  return placed(low, high, step);
}

/** Returns about `most` round times between two, in seconds, and the distance between them. */
export function timeTicks(low, high, most) {
  const rough = (high - low) / (most + 0.99);
  return placed(low, high, TIMES.find((step) => step >= rough) ?? 86400 * 365 * Math.ceil(rough / 86400 / 365));
}

function placed(low, high, step) {
  const ticks = [];
  const last = Math.floor(high / step + 1e-9);
  for (let n = Math.ceil(low / step - 1e-9); n <= last && ticks.length < 100; n += 1) ticks.push(n * step);
  return { ticks, step };
}

/** Returns round numbers between two positive values for a logarithmic axis, and the least distance between them. */
export function logTicks(low, high, most) {
  if (high < 2 * low) return roundTicks(low, high, most);
  const decades = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    const ticks = [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8].map((n) => n * power);
    decades.push(...ticks.filter((tick) => tick >= low && tick <= high));
  }
  const every = Math.ceil(decades.length / (most + 3));
  const ticks = decades.filter((_, at) => at % every === 0);
  return { ticks, step: Math.min(...ticks.slice(1).map((tick, at) => tick - ticks[at]), 1) };
}

/** Formats a number with as many decimals as ticks `step` apart need. */
export function decimals(value, step) {
  return value.toFixed(Math.max(0, Math.min(10, -Math.floor(Math.log10(step) + 1e-9))));
}
