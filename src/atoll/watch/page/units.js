// Formats numbers for people: decimal units, three digits, an en dash where there is no number.

const GAP = "\u00a0"; // a number and its unit stay on one line
export const NONE = "–";

export const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Returns the mean of the numbers among some values; null if there are none. */
export function mean(values) {
  const numbers = values.filter(known);
  return numbers.length ? numbers.reduce((sum, one) => sum + one, 0) / numbers.length : null;
}

const grouped = (value, decimals = 0) =>
  value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });

function digits(value) {
  const size = Math.abs(value);
  return grouped(value, size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}

function scaled(value, units) {
  let at = 0;
  while (Math.abs(value) >= 999.5 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at ? digits(value) : grouped(value)}${GAP}${units[at]}`.trim();
}

/** 1234567 -> "1.23 MB" */
export const bytes = (n) => (known(n) ? scaled(n, ["B", "kB", "MB", "GB", "TB", "PB"]) : NONE);

/** 1234567 -> "1.23 MB/s" */
export const rate = (n) => (known(n) ? `${bytes(n)}/s` : NONE);

/** 12300 -> "12,300" */
export const count = (n) => (known(n) ? grouped(n) : NONE);

/** 213504 -> "214 k" */
export function short(n) {
  if (!known(n)) return NONE;
  if (Math.abs(n) < 999.5) return String(Number(n.toPrecision(3)));
  let at = 0;
  while (Math.abs(n) >= 999.5 && at < 4) {
    n /= 1000;
    at += 1;
  }
  return `${Number(n.toPrecision(3))}${GAP}${["", "k", "M", "G", "T"][at]}`;
}

/** 2.3456 -> "2.346", in nats per token */
export const loss = (n) => (known(n) ? n.toFixed(3) : NONE);

/** 0.876 -> "0.88" */
export const cosine = (n) => (known(n) ? n.toFixed(2) : NONE);

/** 0.0003 -> "0.0003", 3e-7 -> "3e-7" */
export function small(n) {
  if (!known(n)) return NONE;
  return n !== 0 && Math.abs(n) < 1e-4 ? n.toExponential(2).replace(/\.?0+e/, "e") : String(Number(n.toPrecision(3)));
}

/** 0.704 -> "70 %", and "99.8 %" where rounding would give 100 */
export function share(n) {
  if (!known(n)) return NONE;
  if (n > 0 && n < 0.005) return `<1${GAP}%`;
  return n >= 0.99 && n < 1 ? `${Math.min(n * 100, 99.9).toFixed(1)}${GAP}%` : `${Math.round(n * 100)}${GAP}%`;
}

/** 7512 -> "2 h 05 min" */
export function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds <= 0) return `0${GAP}s`;
  if (seconds < 0.9995) return `${Math.max(1, Math.round(seconds * 1000))}${GAP}ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)}${GAP}s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole}${GAP}s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes}${GAP}min${GAP}${two(whole % 60)}${GAP}s`;
  const hours = Math.floor(Math.round(whole / 60) / 60);
  if (hours < 48) return `${hours}${GAP}h${GAP}${two(Math.round(whole / 60) % 60)}${GAP}min`;
  return `${Math.floor(hours / 24)}${GAP}d${GAP}${hours % 24}${GAP}h`;
}

const two = (n) => String(n).padStart(2, "0");

/** The hour of a Unix time, with its day unless that is today. */
export function hour(unix, precise = false) {
  if (!known(unix)) return NONE;
  const date = new Date(unix * 1000);
  const time = { hour: "2-digit", minute: "2-digit", ...(precise && { second: "2-digit" }) };
  const today = date.toDateString() === new Date().toDateString();
  const near = Math.abs(date - Date.now()) < 6 * 86400e3;
  const day = today ? {} : near ? { weekday: "short" } : { day: "numeric", month: "short" };
  return date.toLocaleString("en-GB", { ...day, ...time, hour12: false });
}

/** A place on a time axis whose ticks are `step` seconds apart. */
export function moment(seconds, step) {
  if (step < 1) return `${seconds.toFixed(step < 0.01 ? 3 : step < 0.1 ? 2 : 1)}${GAP}s`;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600), Math.floor(whole / 60)];
  if (step >= 86400) return `${days}${GAP}d`;
  if (step >= 3600) return hours < 48 ? `${hours}${GAP}h` : `${days}${GAP}d${GAP}${hours % 24}${GAP}h`;
  if (step >= 60) return hours ? `${hours}${GAP}h${GAP}${two(minutes % 60)}` : `${minutes}${GAP}min`;
  if (hours) return `${hours}:${two(minutes % 60)}:${two(whole % 60)}`;
  return whole < 60 ? `${whole}${GAP}s` : `${minutes}:${two(whole % 60)}`;
}
