// Numbers for people: three significant digits, with the unit that keeps them short.
const digits = (value: number): string => {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(size >= 1 ? 2 : 3);
};

const scaled = (value: number, step: number, units: readonly string[]): string => {
  let at = 0;
  while (at + 1 < units.length && Math.abs(value) >= step) {
    value /= step;
    at += 1;
  }
  return `${digits(value)}\u00a0${units[at]}`;
};

export const seconds = (s: number): string => {
  if (s >= 7200) return `${digits(s / 3600)}\u00a0h`;
  if (s >= 120) return `${digits(s / 60)}\u00a0min`;
  if (s >= 1 || s === 0) return `${digits(s)}\u00a0s`;
  return s >= 1e-3 ? `${digits(s * 1e3)}\u00a0ms` : s >= 1e-6 ? `${digits(s * 1e6)}\u00a0µs` : `${digits(s * 1e9)}\u00a0ns`;
};
export const days = (value: number): string => (value >= 1 ? value.toFixed(2) : value.toPrecision(3));
export const bytes = (b: number): string => scaled(b, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
export const count = (n: number): string => Math.round(n).toLocaleString("en");
export const large = (n: number): string => scaled(n, 1000, ["", "thousand", "million", "billion", "trillion"]).trim();
export const percent = (share: number): string => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}\u00a0%`;
export const number = (value: unknown): string =>
  typeof value === "number" ? (Number.isInteger(value) && Math.abs(value) < 1e6 ? count(value) : digits(value)) : String(value);
export const change = (before: number, after: number): string => {
  if (!before) return "";
  const share = after / before - 1;
  return Math.abs(share) < 0.0005 ? "no change" : `${share > 0 ? "+" : "−"}${percent(Math.abs(share))}`;
};

/** What the name of a quantity says of its unit. */
export const quantity = (name: string, value: unknown): string => {
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return Array.isArray(value) ? value.join(", ") || "none" : String(value ?? "—");
  if (name.endsWith("_s") && !name.endsWith("per_s")) return seconds(value);
  if (name.endsWith("_bytes")) return bytes(value);
  if (name.endsWith("_Bps")) return scaled(value, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]);
  if (name.endsWith("flops_per_s")) return scaled(value, 1000, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"]);
  return number(value);
};

/** Groups of terms: what each is in plain English, and the colour class of its bar. */
const GROUPS: Record<string, [string, string]> = {
  compute: ["Matrix products and attention", "k1"],
  memory_bound: ["Operations bound by memory bandwidth", "k2"],
  tp_comm: ["Tensor-parallel traffic", "k3"],
  tp2_comm: ["Traffic of the second tensor axis", "k3"],
  cp_comm: ["Context-parallel traffic", "k4"],
  ep_comm: ["Expert-parallel traffic", "k5"],
  dp_comm: ["Data-parallel traffic", "k6"],
  pp_comm: ["Traffic between pipeline stages", "k7"],
  bubble: ["Pipeline bubble (stages wait)", "k8"],
  optimizer: ["Optimiser", "k9"],
  host: ["Launching kernels", "k10"],
  overhead: ["Overhead of the framework", "k11"],
  scaling: ["Ranks that lag, shared links", "k12"],
  offload: ["Copies to and from the host", "k5"],
  recompute: ["Recomputation", "k9"],
  weights: ["Weights", "k1"],
  gradients: ["Gradients", "k4"],
  activations: ["Activations kept for backward", "k6"],
  working: ["Largest temporary", "k8"],
  adapters: ["Adapters", "k5"],
};
const SPARE = ["k3", "k5", "k7", "k10", "k11", "k12"];
export const group = (name: string): { title: string; colour: string } => {
  const known = GROUPS[name];
  if (known) return { title: known[0], colour: known[1] };
  let hash = 0;
  for (const letter of name) hash = (hash * 31 + letter.charCodeAt(0)) % SPARE.length;
  return { title: name.replaceAll("_", " "), colour: SPARE[hash] ?? "k1" };
};

/** A path of a term in words, without its group and the name of its formula. */
export const words = (path: string): string => {
  const parts = path.split("/");
  const middle = parts.slice(1, -1);
  return (middle.length ? middle : [parts.at(-1) ?? path]).join(" · ").replaceAll("_", " ");
};

export interface Part {
  name: string;
  title: string;
  colour: string;
  value: number;
  terms: [string, number][];
}
/** Terms by the first word of their path, largest group first. */
export const parts = (terms: Record<string, number>): Part[] => {
  const found = new Map<string, Part>();
  for (const [path, value] of Object.entries(terms)) {
    const name = path.split("/")[0] ?? path;
    let part = found.get(name);
    if (!part) found.set(name, (part = { name, ...group(name), value: 0, terms: [] }));
    part.value += value;
    part.terms.push([path, value]);
  }
  for (const part of found.values()) part.terms.sort((a, b) => b[1] - a[1]);
  return [...found.values()].sort((a, b) => b.value - a.value);
};

const SHORT: [string, string][] = [
  ["dp", "dp"], ["tp", "tp"], ["tp2", "tp2"], ["cp", "cp"], ["pp", "pp"], ["vpp", "vpp"], ["ep", "ep"], ["etp", "etp"],
];
/** Degrees of a plan above 1, then what else tells plans apart. */
export const brief = (plan: Record<string, unknown>): string => {
  const axes = SHORT.filter(([key]) => Number(plan[key] ?? 1) > 1).map(([key, short]) => `${short} ${plan[key]}`);
  const rest = [`micro-batch ${plan.micro_batch ?? 1}`];
  if (plan.recompute && plan.recompute !== "none") rest.push(`recompute ${plan.recompute}`);
  rest.push(`ZeRO ${plan.zero ?? 0}`);
  return [axes.join(" × ") || "one device", ...rest].join(", ");
};
export const placed = (value: unknown): string =>
  value && typeof value === "object" && !Array.isArray(value)
    ? Object.entries(value).map(([axis, n]) => `${axis} ${n}`).join(", ")
    : quantity("", value);
