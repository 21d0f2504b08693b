// The job: model, cluster and what is trained on them; and the degrees of one plan.
import { useState } from "preact/hooks";
import { embedded } from "./api";
import { bytes, large, quantity } from "./format";
import { askable, job, setDegree, setJob, state, type Job } from "./state";
import type { Cluster, Plan } from "./types";
import { choices, estimate } from "./work";

const Field = (props: { label: string; hint?: string; children: preact.ComponentChildren }) => (
  <label class="field"><span>{props.label}{props.hint && <small> {props.hint}</small>}</span>{props.children}</label>
);
const Select = (props: { label: string; value: string; options: readonly (string | [string, string])[]; change: (value: string) => void }) => (
  <Field label={props.label}>
    <select value={props.value} onChange={(event) => props.change(event.currentTarget.value)}>
      {props.options.map((option) => {
        const [value, title] = typeof option === "string" ? [option, option] : option;
        return <option key={value} value={value} selected={value === props.value}>{title}</option>;
      })}
    </select>
  </Field>
);
const Count = (props: { label: string; hint?: string; name: keyof Job; optional?: boolean }) => {
  const value = job.value[props.name] as number;
  return (
    <Field label={props.label} {...(props.hint ? { hint: props.hint } : {})}>
      <input type="number" min={props.optional ? 0 : 1} max={1e9} step={1} inputMode="numeric" value={value || ""} placeholder={props.optional ? "the model's" : ""}
        onInput={(event) => {
          const given = Math.floor(Number(event.currentTarget.value));
          if (given > 0 || (props.optional && !event.currentTarget.value)) setJob({ [props.name]: Math.max(0, given || 0) });
        }} />
    </Field>
  );
};

const Pasted = (props: { label: string; hint: string; value: string; change: (text: string) => void }) => {
  const [text, setText] = useState(props.value);
  return (
    <div class="pasted">
      <Field label={props.label} hint={props.hint}>
        <textarea rows={7} spellcheck={false} value={text} onInput={(event) => setText(event.currentTarget.value)} />
      </Field>
      <div class="row">
        <button type="button" disabled={!text.trim() || text === props.value} onClick={() => props.change(text)}>Use it</button>
        {props.value && <button type="button" class="plain" onClick={() => { setText(""); props.change(""); }}>Back to the catalogue</button>}
      </div>
    </div>
  );
};

const GBps = (value: number): string => `${Number((value / 1e9).toPrecision(6))} GB/s`;
/** A cluster file that changes numbers of one of the catalogue. */
const clusterToml = (base: Cluster, given: Record<string, string>): string => {
  const lines = [`base = "${base.name}"`];
  const device = ["memory", "memory_bandwidth"].filter((key) => given[key]).map((key) => `${key} = "${given[key]}"`);
  const rate = given.bf16 ? ["", "[device.matrix]", `bf16 = "${given.bf16}"`] : [];
  if (device.length || rate.length) lines.push("", "[device]", `base = "${base.device}"`, ...device, ...rate);
  for (const level of base.levels) {
    const own = [
      ...(given[`${level.name}.devices`] ? [`devices = ${Math.floor(Number(given[`${level.name}.devices`])) || 1}`] : []),
      ...(given[`${level.name}.bandwidth`] ? [`bandwidth = "${given[`${level.name}.bandwidth`]}"`] : []),
    ];
    if (own.length) lines.push("", `[levels.${level.name}]`, ...own);
  }
  return `${lines.join("\n")}\n`;
};
const Numbers = ({ base }: { base: Cluster }) => {
  const fields: [string, string, string][] = [
    ["memory", "Memory of a device", `${Number((base.memory_bytes / 2 ** 30).toPrecision(4))} GiB`],
    ["memory_bandwidth", "Memory bandwidth", GBps(base.memory_Bps)],
    ["bf16", "Matrix rate in bf16", base.matrix_flops_per_s.bf16 ? `${base.matrix_flops_per_s.bf16 / 1e12} TFLOP/s` : "none"],
    ...base.levels.flatMap((level): [string, string, string][] => [
      ...(level.devices ? [[`${level.name}.devices`, `Devices in ${level.name}`, String(level.devices)] as [string, string, string]] : []),
      [`${level.name}.bandwidth`, `Bandwidth of ${level.name}`, GBps(level.link_Bps)],
    ]),
  ];
  const [given, setGiven] = useState<Record<string, string>>({});
  const changed = Object.values(given).some((text) => text.trim());
  return (
    <div class="numbers">
      {fields.map(([key, label, now]) => (
        <Field key={key} label={label}>
          <input type="text" value={given[key] ?? ""} placeholder={now}
            onInput={(event) => setGiven({ ...given, [key]: event.currentTarget.value.trim() })} />
        </Field>
      ))}
      <button type="button" disabled={!changed} onClick={() => setJob({ clusterText: clusterToml(base, given) })}>Use these numbers</button>
    </div>
  );
};

export const clusterOf = (name: string): Cluster | null => choices.value?.clusters.find((one) => one.name === name) ?? null;

export const JobForm = () => {
  const of = job.value;
  const known = choices.value;
  const model = known?.models.find((one) => one.name === of.model);
  const cluster = clusterOf(of.cluster);
  return (
    <form class="job" onSubmit={(event) => event.preventDefault()} aria-label="Job">
      <fieldset>
        <legend>Model</legend>
        {of.modelText ? <p class="note">A pasted model is used.</p> : (
          <>
            <Select label="Model" value={of.model} change={(name) => setJob({ model: name })}
              options={known?.models.map((one) => [one.name, `${one.name} (${large(one.parameters)})`] as [string, string]) ?? [of.model]} />
            {model && <p class="note">{model.layers} layers, hidden width {model.hidden}, {model.heads} heads{model.experts ? ", experts" : ""}</p>}
          </>
        )}
        <details open={!!of.modelText}>
          <summary>Paste a model</summary>
          <Pasted label="config.json or TOML" hint="of the model" value={of.modelText} change={(text) => setJob({ modelText: text })} />
        </details>
      </fieldset>
      <fieldset>
        <legend>Cluster</legend>
        {of.clusterText ? <p class="note">Your own numbers are used.</p> : (
          <>
            <Select label="Cluster" value={of.cluster} change={(name) => setJob({ cluster: name })}
              options={known?.clusters.map((one) => one.name) ?? [of.cluster]} />
            {cluster && <p class="note">{cluster.title}: {bytes(cluster.memory_bytes)} a device, {cluster.levels.map((level) =>
              `${level.name} ${quantity("_Bps", level.link_Bps)}${level.devices ? ` × ${level.devices}` : ""}`).join(", ")}</p>}
          </>
        )}
        {cluster && <details><summary>Change numbers</summary><Numbers key={cluster.name} base={cluster} /></details>}
        <details open={!!of.clusterText}>
          <summary>Paste a cluster</summary>
          <Pasted key={of.clusterText} label="TOML" hint="of a cluster" value={of.clusterText} change={(text) => setJob({ clusterText: text })} />
        </details>
      </fieldset>
      <fieldset class="two">
        <legend>Training</legend>
        <Count label="Devices" name="gpus" />
        <Count label="Batch" hint="(sequences)" name="batch" />
        <Count label="Sequence" hint="(tokens)" name="seq" optional />
        <Select label="Precision" value={of.dtype} options={known?.dtypes ?? [of.dtype]} change={(dtype) => setJob({ dtype })} />
        <Select label="Optimiser" value={of.optimizer} options={known?.optimizers ?? [of.optimizer]} change={(optimizer) => setJob({ optimizer })} />
        <Select label="Framework" value={of.framework} options={known?.frameworks ?? [of.framework]} change={(framework) => setJob({ framework })} />
        <Select label="Strategy" value={of.strategy} change={(strategy) => setJob({ strategy })}
          options={[["auto", "auto"], ["1d", "1D"], ["context", "context"], ["2d", "2D (SUMMA)"]]} />
        <Field label="Tokens" hint="(of the run)">
          <input type="text" value={of.tokens} placeholder="such as 1T" onInput={(event) => setJob({ tokens: event.currentTarget.value.trim() })} />
        </Field>
        <Select label="Mode" value={of.mode} options={["corrected", "published"]} change={(mode) => setJob({ mode })} />
      </fieldset>
    </form>
  );
};

/** Divisors of a number, in order. */
export const divisors = (n: number): number[] => {
  const out: number[] = [];
  for (let d = 1; d <= Math.min(n, 4096); d += 1) if (n % d === 0) out.push(d);
  if (n > 4096) out.push(...out.map((d) => n / d).filter((d) => Number.isInteger(d) && d > 4096));
  return [...new Set(out)].sort((a, b) => a - b);
};
export const doublings = (high: number): number[] => Array.from({ length: Math.floor(Math.log2(high)) + 1 }, (_, i) => 2 ** i);

const Degree = (props: { name: string; label: string; value: number; options: number[]; change: (value: number) => void }) => {
  const options = props.options.includes(props.value) ? props.options : [...props.options, props.value].sort((a, b) => a - b);
  const at = options.indexOf(props.value);
  const move = (to: number): void => {
    const value = options[to];
    if (value !== undefined && value !== props.value) props.change(value);
  };
  return (
    <div class="degree">
      <label for={`degree-${props.name}`}>{props.label}</label>
      <output for={`degree-${props.name}`}>{props.value}</output>
      <div class="slide">
        <button type="button" aria-label={`${props.label}: less`} disabled={at <= 0} onClick={() => move(at - 1)}>−</button>
        <input id={`degree-${props.name}`} type="range" min={0} max={options.length - 1} step={1} value={at} aria-valuetext={String(props.value)}
          onInput={(event) => move(Number(event.currentTarget.value))} />
        <button type="button" aria-label={`${props.label}: more`} disabled={at >= options.length - 1} onClick={() => move(at + 1)}>+</button>
      </div>
    </div>
  );
};

/** Degrees that can be changed, and what else tells plans apart. A changed degree lets the placement and dp follow. */
export const Degrees = () => {
  const found = estimate.value.value;
  if (!found || embedded) return null;
  const plan: Plan = { ...askable(found.plan), ...state.value.plan };
  const number = (key: string, usual = 1): number => Number(state.value.plan?.[key] ?? found.plan[key] ?? usual);
  const change = (key: string, value: number | string): void => setDegree(plan, key, value);
  const gpus = job.value.gpus;
  const experts = !!choices.value?.models.find((one) => one.name === job.value.model)?.experts || !!job.value.modelText;
  const summa = job.value.strategy === "2d" || plan.strategy === "2d" || number("tp2") > 1;
  const ranks = divisors(gpus);
  const axes: [string, string, number[]][] = [
    ["tp", "Tensor (tp)", ranks.filter((n) => n <= 64)],
    ...(summa ? [["tp2", "Second tensor axis", ranks.filter((n) => n <= 64)], ["panels", "Panels", doublings(64)]] as [string, string, number[]][] : []),
    ["cp", "Context (cp)", ranks.filter((n) => n <= 64)],
    ["pp", "Pipeline (pp)", ranks.filter((n) => n <= 128)],
    ["vpp", "Virtual stages (vpp)", [1, 2, 3, 4, 5, 6, 8, 10, 12, 16]],
    ...(experts ? [["ep", "Expert (ep)", doublings(256).filter((n) => n <= gpus)], ["etp", "Tensor of experts (etp)", ranks.filter((n) => n <= 64)]] as [string, string, number[]][] : []),
    ["micro_batch", "Micro-batch", doublings(Math.max(1, Math.min(64, job.value.batch)))],
  ];
  return (
    <section class="degrees" aria-label="Change the plan">
      <div class="grid">
        {axes.map(([name, label, options]) => (
          <Degree key={name} name={name} label={label} value={number(name)} options={options} change={(value) => change(name, value)} />
        ))}
        <div class="degree"><span>Data (dp)</span><output>{String(found.plan.dp)}</output><p class="note">what the others leave</p></div>
      </div>
      <div class="row choices">
        <Select label="Recompute" value={String(plan.recompute ?? "none")} change={(value) => change("recompute", value)}
          options={[...new Set(["none", "attention", "selective", "full", String(plan.recompute ?? "none")])]} />
        <Select label="ZeRO stage" value={String(plan.zero ?? found.plan.zero)} options={["0", "1", "2", "3"]} change={(value) => change("zero", Number(value))} />
        {number("tp") > 1 && <Select label="Sequence parallel" value={String(number("sp"))} options={[["1", "yes"], ["0", "no"]]} change={(value) => change("sp", Number(value))} />}
        <Select label="Schedule" value={String(plan.schedule ?? "1f1b")} options={choices.value?.schedules ?? ["1f1b"]} change={(value) => change("schedule", value)} />
      </div>
    </section>
  );
};
