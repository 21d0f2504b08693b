// Answers of the API, as far as the page draws them; names and units are those of `steptime ... --json`.
export type Terms = Record<string, number>;
export type Value = string | number | boolean | null | string[] | Record<string, number>;
export type Plan = Record<string, Value>;

export interface Call {
  function: string;
  arguments: Record<string, unknown>;
  factors: Record<string, number>;
}
export interface Detail extends Call {
  path: string;
  value: number;
  basis: string;
  further: Call[];
}
export interface Estimate {
  step_time_s: number;
  step_time_bracket_s: [number, number];
  step_time_band_s: [number, number] | null;
  mfu: number;
  hfu: number;
  tokens_per_s_per_gpu: number;
  samples_per_s: number;
  time: Terms;
  overlapped: Terms;
  peak_memory_bytes: number;
  memory: Terms;
  memory_capacity_bytes: number;
  memory_by_definition: Record<string, number>;
  oom_probability: number;
  feasible: boolean;
  reasons: string[];
  bottleneck: string;
  plan: Plan;
  provenance: {
    model: string;
    cluster: string;
    device: string;
    mode: string;
    band: string;
    framework: string;
    weakest_kind: string;
    steptime_version: string;
    assumptions: string[];
    constants: Record<string, { value: number; source: string; kind: string }>;
  };
  workload: Record<string, Value>;
  what_if: Record<string, number>;
  notes: string[];
  details?: Detail[];
  training?: { training_days: number; training_band_days: [number, number] | null; gpu_hours: number; gpu_days: number; steps: number };
}
export interface Point {
  step_time_s: number;
  peak_memory_bytes: number;
  plan: Plan;
}
export interface Ranking {
  candidates: number;
  feasible: number;
  reasons: Record<string, number>;
  stop: { reason: string; proof: string; elapsed_cpu_s: number };
  plans: Estimate[];
  pareto: Point[];
  nearest: Estimate | null;
  likely_to_fit: Estimate | null;
  advice: string[];
  notes: string[];
}
export interface Simulated {
  schedule: string;
  ranks: number;
  stages: number;
  micro_batches: number;
  step_time_s: number;
  pipeline_s: number;
  closed_form_s: number | null;
  bubble_fraction: number;
  spent_by_rank_s: Record<string, number[]>;
  notes: string[];
  timeline: {
    rank: number[];
    start_ns: number[];
    end_ns: number[];
    kind: string[];
    stage: number[];
    micro_batch: number[];
  };
}
export interface Series {
  name: string;
  style: string;
  x: number[];
  y: number[];
  size: number[];
  labels: string[];
}
export interface Panel {
  x: { label: string; unit: string };
  y: { label: string; unit: string };
  series: Series[];
}
export interface Chart {
  title: string;
  panels: Panel[];
  notes: string[];
}
export interface Difference {
  headline: Record<string, [Value, Value]>;
  plan: Record<string, [Value, Value]>;
  time: Record<string, [number, number]>;
  memory: Record<string, [number, number]>;
}
export interface Decision {
  question: string;
  answer: string;
  because: string;
  turns: string;
  beaten: { name: string; step_time_s: number | null; plan: Plan | null }[];
  plan: Plan | null;
  step_time_s: number | null;
}
export interface Guide {
  decisions: Decision[];
  shortcut: Estimate | null;
  best: Estimate | null;
  notes: string[];
}
export interface Level {
  name: string;
  devices: number | null;
  link_Bps: number;
  links_per_device: number;
}
export interface Cluster {
  name: string;
  title: string;
  device: string;
  device_title: string;
  memory_bytes: number;
  memory_Bps: number;
  matrix_flops_per_s: Record<string, number>;
  levels: Level[];
}
export interface Model {
  name: string;
  family: string;
  seq_len: number;
  layers: number;
  hidden: number;
  heads: number;
  experts: boolean;
  parameters: number;
}
export interface Choices {
  version: string;
  models: Model[];
  clusters: Cluster[];
  frameworks: string[];
  schedules: string[];
  dtypes: string[];
  optimizers: string[];
}
export interface Formula {
  summary: string;
  latex: string;
  mathml: string;
  symbols: Record<string, string>;
  source: string;
}
export type Formulas = Record<string, Formula>;
