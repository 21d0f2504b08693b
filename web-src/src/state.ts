// All that the page shows follows from one record, which is the fragment of its address.
import { computed, signal } from "@preact/signals";
import type { Plan } from "./types";

export interface Job {
  model: string;
  modelText: string;
  cluster: string;
  clusterText: string;
  gpus: number;
  batch: number;
  seq: number;
  dtype: string;
  optimizer: string;
  framework: string;
  strategy: string;
  mode: string;
  /** Tokens of the whole run, as 1T; empty: not asked. */
  tokens: string;
}
export interface Chosen {
  job: Job;
  /** Keys of a plan that are not the default; null: the best one. */
  plan: Plan | null;
}
export const VIEWS = ["plans", "time", "memory", "explain", "roofline", "timeline", "mesh", "map", "scaling", "guide", "compare"] as const;
export type View = (typeof VIEWS)[number];
export interface State extends Chosen {
  view: View;
  sort: string;
  /** What the current plan is compared with. */
  pinned: Chosen | null;
  /** Term whose formula is open. */
  term: string;
}

export const START: Job = {
  model: "llama3-70b", modelText: "", cluster: "dgx-h100", clusterText: "", gpus: 64, batch: 256, seq: 0, dtype: "bf16",
  optimizer: "adam", framework: "generic", strategy: "auto", mode: "corrected",
  tokens: "",
};
export const FIRST: State = { job: START, plan: null, view: "plans", sort: "step_time_s", pinned: null, term: "" };

/** Plain values of plan keys; a key with this value is not written. */
const NEUTRAL: Record<string, unknown> = {
  tp: 1, tp2: 1, cp: 1, pp: 1, vpp: 1, ep: 1, etp: 1, sp: 1, panels: 1, recompute: "none", recompute_every: 1, shard: 0,
  schedule: "1f1b",
};
const KEPT = [
  "dp", "tp", "tp2", "cp", "pp", "vpp", "ep", "etp", "sp", "micro_batch", "panels", "recompute", "recompute_every", "zero",
  "shard", "schedule", "placement",
];
const TEXTS = new Set(["recompute", "schedule"]);

/** The keys of a reported plan with which it can be asked for again. */
export const askable = (plan: Plan): Plan => {
  const out: Plan = {};
  for (const key of KEPT) {
    const value = plan[key];
    if (value === undefined || value === null || value === NEUTRAL[key]) continue;
    if (key === "schedule" && value === "interleaved") continue;
    out[key] = value;
  }
  return out;
};

const written = (prefix: string, chosen: Chosen, out: URLSearchParams): void => {
  for (const [key, value] of Object.entries(chosen.job)) {
    if (value !== START[key as keyof Job] || (!prefix && ["model", "cluster", "gpus", "batch"].includes(key))) {
      out.set(prefix + key, String(value));
    }
  }
  for (const [key, value] of Object.entries(chosen.plan ?? {})) {
    const text = typeof value === "object" && value ? Object.entries(value).map((pair) => pair.join(":")).join(",") : value;
    out.set(`${prefix}plan.${key}`, String(text));
  }
};
const read = (prefix: string, from: URLSearchParams): Chosen => {
  const job = { ...START };
  for (const key of Object.keys(START) as (keyof Job)[]) {
    const text = from.get(prefix + key);
    if (text === null) continue;
    const number = Number(text);
    if (typeof START[key] === "string") Object.assign(job, { [key]: text });
    else if (Number.isSafeInteger(number) && number >= 0) Object.assign(job, { [key]: number });
  }
  const plan: Plan = {};
  for (const key of KEPT) {
    const text = from.get(`${prefix}plan.${key}`);
    if (text === null) continue;
    if (key === "placement") {
      plan[key] = Object.fromEntries(text.split(",").map((pair) => [pair.split(":")[0] ?? "", Number(pair.split(":")[1])]));
    } else if (TEXTS.has(key)) plan[key] = text;
    else if (Number.isSafeInteger(Number(text))) plan[key] = Number(text);
  }
  return { job, plan: Object.keys(plan).length ? plan : null };
};

export const toFragment = (state: State): string => {
  const out = new URLSearchParams();
  written("", state, out);
  if (state.view !== FIRST.view) out.set("view", state.view);
  if (state.sort !== FIRST.sort) out.set("sort", state.sort);
  if (state.term) out.set("term", state.term);
  if (state.pinned) {
    out.set("with", "1");
    written("with.", state.pinned, out);
  }
  return out.toString();
};
export const fromFragment = (fragment: string): State => {
  const from = new URLSearchParams(fragment.replace(/^#/, ""));
  const view = VIEWS.find((name) => name === from.get("view")) ?? FIRST.view;
  return {
    ...read("", from),
    view,
    sort: from.get("sort") ?? FIRST.sort,
    term: from.get("term") ?? "",
    pinned: from.get("with") ? read("with.", from) : null,
  };
};

export const state = signal<State>(FIRST);
export const job = computed(() => state.value.job);
/** What a search depends on: the length of the run is not part of it. */
export const jobKey = computed(() => JSON.stringify({ ...state.value.job, tokens: "" }));

/** Change the state; the address follows. `push`: a step that the browser's back button undoes. */
export const go = (change: Partial<State>, push = false): void => {
  state.value = { ...state.value, ...change };
  const fragment = `#${toFragment(state.value)}`;
  if (fragment === location.hash) return;
  if (push) history.pushState(null, "", fragment);
  else history.replaceState(null, "", fragment);
};
const PAUSE_MS = 2000;
let edited = { field: "", at: 0 };
/** Whether an edit is a step of its own for the back button: letters and drags of one field in a row are one step. */
const isStep = (field: string): boolean => {
  const now = Date.now();
  const own = field !== edited.field || now - edited.at > PAUSE_MS;
  edited = { field, at: now };
  return own;
};
/** A plan is of its model; on other devices the data ranks and the placement follow from its other degrees. */
export const setJob = (change: Partial<Job>): void => {
  let plan = state.value.plan;
  if (plan && ("model" in change || "modelText" in change)) plan = null;
  if (plan && ("gpus" in change || "cluster" in change || "clusterText" in change)) {
    const { dp: _, placement: __, shard: ___, ...rest } = plan;
    plan = Object.keys(rest).length ? rest : null;
  }
  go({ job: { ...state.value.job, ...change }, plan }, isStep(Object.keys(change).join()));
};
/** One key of a plan; the data ranks and the placement follow. */
export const setDegree = (plan: Plan, key: string, value: number | string): void => {
  const { placement: _, dp: __, shard: ___, ...rest } = plan;
  go({ plan: { ...rest, [key]: value } }, isStep(`plan.${key}`));
};
export const setPlan = (plan: Plan | null, push = false): void => go({ plan }, push);

/** A job and its plan as the API takes them. */
export const asked = ({ job: of, plan }: Chosen): Record<string, unknown> => ({
  model: of.modelText ? { text: of.modelText } : of.model,
  cluster: of.clusterText ? { text: of.clusterText } : of.cluster,
  gpus: of.gpus,
  global_batch: of.batch,
  ...(of.seq ? { seq: of.seq } : {}),
  dtype: of.dtype,
  optimizer: of.optimizer,
  ...(of.mode === "published" ? { mode: of.mode } : { framework: of.framework }),
  ...(of.strategy === "auto" ? {} : { strategy: of.strategy }),
  ...(plan ? { plan } : {}),
});
