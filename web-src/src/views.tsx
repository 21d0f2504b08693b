// What is shown of a plan: ranked plans, time, memory, formulas, timeline, mesh, scaling, comparison.
import { useEffect, useState } from "preact/hooks";
import { allFormulas, ask, embedded, Problem, stop, stopped } from "./api";
import { Figure, HeatMap, Roofline, Scaling, Scatter, Stack, type Cell, type Dot, type Scale } from "./charts";
import { brief, bytes, change, count, number, parts, percent, placed, quantity, seconds, words, type Part } from "./format";
import { clusterOf, divisors, doublings } from "./form";
import { Gantt } from "./gantt";
import { Mesh } from "./mesh";
import { asked, askable, go, job, jobKey, setPlan, state, type Chosen } from "./state";
import type { Call, Chart, Detail, Difference, Estimate, Formula, Formulas, Guide, Plan, Ranking, Simulated } from "./types";
import { estimate, isAtHand, ranking, shownPlan } from "./work";

export const Fault = ({ error }: { error: Problem }) => (
  <div class="fault" role="alert"><strong>{error.message}</strong>{error.hint && <p>{error.hint}</p>}</div>
);
const Notes = ({ notes }: { notes: string[] }) => notes.length ? <ul class="notes">{notes.map((note) => <li key={note}>{note}</li>)}</ul> : null;

const Legend = ({ of, total, unit, hidden }: { of: Part[]; total: number; unit: (value: number) => string; hidden?: Map<string, number> }) => (
  <div class="scroll" role="region" aria-label="Terms" tabIndex={0}>
    <table class="terms">
      <thead><tr><th>Part</th><th class="n">{hidden ? "Exposed" : "Size"}</th><th class="n">Share</th>{hidden && <th class="n">Hidden</th>}</tr></thead>
      {of.map((part) => (
        <tbody key={part.name}>
          <tr>
            <th scope="row">
              <details>
                <summary><i class={`swatch ${part.colour}`} />{part.title}</summary>
                <ul class="inner">
                  {part.terms.slice(0, 24).map(([path, value]) => (
                    <li key={path}>
                      <button type="button" class="link" title={path} onClick={() => go({ view: "explain", term: path }, true)}>{words(path)}</button>
                      <span>{unit(value)}</span>
                    </li>
                  ))}
                </ul>
              </details>
            </th>
            <td class="n">{unit(part.value)}</td><td class="n">{total ? percent(part.value / total) : ""}</td>
            {hidden && <td class="n">{hidden.get(part.name) ? unit(hidden.get(part.name) ?? 0) : ""}</td>}
          </tr>
        </tbody>
      ))}
    </table>
  </div>
);

export const TimeView = ({ found }: { found: Estimate }) => {
  const exposed = parts(found.time);
  const hidden = parts(found.overlapped).filter((part) => part.value > 0);
  const rest = hidden.filter((part) => !exposed.some((one) => one.name === part.name)).map((part) => ({ ...part, value: 0, terms: [] }));
  const sum = (of: Part[]): number => of.reduce((total, part) => total + part.value, 0);
  const full = Math.max(sum(exposed), sum(hidden)) || 1;
  const better = Object.entries(found.what_if).sort((a, b) => a[1] - b[1]);
  const largest = exposed[0];
  return (
    <>
      <p>Of a step of <strong>{seconds(found.step_time_s)}</strong>, {largest ? `${percent(largest.value / found.step_time_s)} is ${largest.title.toLowerCase()}. ` : ""}
        The second bar is what happens at the same time and costs nothing.</p>
      <Figure name="time" says={`time of a step by part: ${exposed.map((part) => `${part.title} ${seconds(part.value)}`).join(", ")}`} height={hidden.length ? 118 : 64}>
        {(width) => (
          <>
            <text class="small" x={0} y={12}>exposed, {seconds(sum(exposed))}</text>
            <Stack parts={exposed} full={full} x={0} y={18} width={width} height={38} unit={seconds} />
            {hidden.length > 0 && <>
              <text class="small" x={0} y={76}>hidden, {seconds(sum(hidden))}</text>
              <Stack parts={hidden} full={full} x={0} y={82} width={width} height={30} unit={seconds} hatch="hatch-time" />
            </>}
          </>
        )}
      </Figure>
      <Legend of={[...exposed, ...rest]} total={found.step_time_s} unit={seconds} hidden={new Map(hidden.map((part) => [part.name, part.value]))} />
      {better.length > 0 && <>
        <h3>What would make it faster</h3>
        <div class="scroll" role="region" aria-label="What would make it faster" tabIndex={0}><table>
          <thead><tr><th>If this were better</th><th class="n">Step</th><th class="n">Change</th></tr></thead>
          <tbody>{better.map(([name, s]) => (
            <tr key={name}><th scope="row">{name.replaceAll("_", " ").replace(/ x([\d.]+)$/, " × $1")}</th><td class="n">{seconds(s)}</td>
              <td class="n">{change(found.step_time_s, s)}</td></tr>
          ))}</tbody>
        </table></div>
      </>}
    </>
  );
};

export const MemoryView = ({ found }: { found: Estimate }) => {
  const held = parts(found.memory);
  const capacity = found.memory_capacity_bytes;
  const said = Object.entries(found.memory_by_definition);
  const full = Math.max(capacity, found.peak_memory_bytes, ...said.map(([, value]) => value)) * 1.02;
  const names: Record<string, string> = { allocated: "live tensors", reserved: "reserved by the allocator", device: "used on the device" };
  return (
    <>
      <p>The fullest device holds <strong>{bytes(found.peak_memory_bytes)}</strong> of {bytes(capacity)};
        {" "}it runs out of memory with a chance of <strong>{percent(found.oom_probability)}</strong>.</p>
      <Figure name="memory" says={`memory by part: ${held.map((part) => `${part.title} ${bytes(part.value)}`).join(", ")}; capacity ${bytes(capacity)}`} height={70 + 24 * said.length}>
        {(width) => {
          const x = (value: number): number => (value / full) * width;
          return (
            <>
              <Stack parts={held} full={full} x={0} y={18} width={width} height={38} unit={bytes} />
              {said.map(([name, value], i) => (
                <g key={name}>
                  <rect class="fill soft" x={0} y={66 + 24 * i} width={x(value)} height={16} rx="3" />
                  <text class="small" x={6} y={78 + 24 * i}>{names[name] ?? name}: {bytes(value)}</text>
                </g>
              ))}
              <line class="limit" x1={x(capacity)} x2={x(capacity)} y1={14} y2={66 + 24 * said.length} />
              <text class="small" x={x(capacity) - 4} y={11} text-anchor="end">capacity {bytes(capacity)}</text>
            </>
          );
        }}
      </Figure>
      <Legend of={held} total={found.peak_memory_bytes} unit={bytes} />
    </>
  );
};

/** Axes that lie inside a fast domain. */
const inside = (plan: Plan): string =>
  Object.entries((plan.placement ?? {}) as Record<string, number>).filter(([, n]) => n > 1).map(([axis, n]) => `${axis} ${n}`).join(", ") || "—";
interface Column { key: string; title: string; of: (row: Estimate) => number | string; show: (row: Estimate) => string }
const value = (key: string, title: string): Column => ({ key, title, of: (row) => Number(row.plan[key] ?? 1), show: (row) => String(row.plan[key] ?? 1) });
const COLUMNS: Column[] = [
  { key: "step_time_s", title: "Step", of: (row) => row.step_time_s, show: (row) => seconds(row.step_time_s) },
  { key: "mfu", title: "MFU", of: (row) => -row.mfu, show: (row) => percent(row.mfu) },
  { key: "memory", title: "Memory", of: (row) => row.peak_memory_bytes, show: (row) => bytes(row.peak_memory_bytes) },
  { key: "oom", title: "Out of memory", of: (row) => row.oom_probability, show: (row) => percent(row.oom_probability) },
  value("dp", "dp"), value("tp", "tp"), value("cp", "cp"), value("pp", "pp"), value("vpp", "vpp"), value("ep", "ep"),
  { key: "placement", title: "In a domain", of: (row) => inside(row.plan), show: (row) => inside(row.plan) },
  value("micro_batch", "Micro-batch"),
  { key: "recompute", title: "Recompute", of: (row) => String(row.plan.recompute), show: (row) => String(row.plan.recompute) },
  { key: "zero", title: "ZeRO", of: (row) => Number(row.plan.zero), show: (row) => String(row.plan.zero) },
];
const same = (a: Plan, b: Plan): boolean => JSON.stringify(askable(a)) === JSON.stringify(askable(b));

const Table = ({ found, shown }: { found: Ranking; shown: Plan | null }) => {
  const [all, setAll] = useState(false);
  const [name, down] = state.value.sort.startsWith("-") ? [state.value.sort.slice(1), true] : [state.value.sort, false];
  const column = COLUMNS.find((one) => one.key === name) ?? COLUMNS[0]!;
  const rows = found.plans.map((row, rank) => ({ row, rank }));
  rows.sort((a, b) => {
    const [x, y] = [column.of(a.row), column.of(b.row)];
    return (x < y ? -1 : x > y ? 1 : a.rank - b.rank) * (down ? -1 : 1);
  });
  const columns = COLUMNS.filter(({ key }) => !["ep", "cp"].includes(key) || found.plans.some((row) => Number(row.plan[key]) > 1));
  return (
    <>
      <div class="scroll" role="region" aria-label="Ranked plans" tabIndex={0}>
        <table class="plans">
          <thead><tr><th scope="col">Plan</th>{columns.map((one) => (
            <th key={one.key} scope="col" class="n" aria-sort={one.key === name ? (down ? "descending" : "ascending") : "none"}>
              <button type="button" class="sort" onClick={() => go({ sort: one.key === name && !down ? `-${one.key}` : one.key })}>
                {one.title}<span aria-hidden="true">{one.key === name ? (down ? " ↓" : " ↑") : ""}</span>
              </button>
            </th>
          ))}</tr></thead>
          <tbody>{rows.slice(0, all ? rows.length : 12).map(({ row, rank }) => {
            const on = !!shown && same(row.plan, shown);
            return (
              <tr key={rank} class={on ? "on" : ""}>
                <td><button type="button" class="pick" aria-pressed={on} aria-label={`Show plan ${rank + 1}: ${brief(row.plan)}`}
                  onClick={() => setPlan(askable(row.plan), true)}>{rank + 1}</button></td>
                {columns.map((one) => <td key={one.key} class="n">{one.show(row)}</td>)}
              </tr>
            );
          })}</tbody>
        </table>
      </div>
      {rows.length > 12 && <button type="button" class="plain" onClick={() => setAll(!all)}>{all ? "Show fewer" : `Show all ${rows.length}`}</button>}
    </>
  );
};

export const PlansView = () => {
  const { value: found, error } = ranking.value;
  if (error && embedded) return <p class="note">This report has one plan and no ranking.</p>;
  if (error) return estimate.value.error?.message === error.message ? null : <Fault error={error} />;
  if (!found) return <p class="note">Searching…</p>;
  const shown = state.value.plan ?? shownPlan();
  const capacity = (found.plans[0] ?? found.nearest)?.memory_capacity_bytes ?? 1;
  const dots: Dot[] = [
    ...found.plans.map((row): Dot => ({
      x: row.step_time_s, y: row.peak_memory_bytes, front: false, shown: !!shown && same(row.plan, shown),
      title: `${brief(row.plan)}: ${seconds(row.step_time_s)}, ${bytes(row.peak_memory_bytes)}`, pick: () => setPlan(askable(row.plan), true),
    })),
    ...found.pareto.map((point): Dot => ({
      x: point.step_time_s, y: point.peak_memory_bytes, front: true, shown: !!shown && same(point.plan, shown),
      title: `on the front: ${brief(point.plan)}: ${seconds(point.step_time_s)}, ${bytes(point.peak_memory_bytes)}`,
      ...(embedded ? {} : { pick: () => setPlan(askable(point.plan), true) }),
    })),
  ];
  const far = found.plans[0] ? found.plans[0].step_time_s * 3 : Infinity;
  const near = dots.filter((dot) => dot.x <= far);
  const reasons = Object.entries(found.reasons).map(([name, n]) => `${name} ${count(n)}`).join(", ");
  return (
    <>
      <p><strong>{count(found.feasible)}</strong> of {count(found.candidates)} candidates fit.{" "}
        {found.stop.proof.charAt(0).toUpperCase() + found.stop.proof.slice(1)}{/[.]$/.test(found.stop.proof) ? "" : "."}{reasons && ` Left out: ${reasons} (one may have several reasons).`}</p>
      {found.likely_to_fit && !embedded && (
        <p>The first may run out of memory. The fastest that likely does not takes {seconds(found.likely_to_fit.step_time_s)}:
          {" "}<button type="button" class="link" onClick={() => found.likely_to_fit && setPlan(askable(found.likely_to_fit.plan), true)}>{brief(found.likely_to_fit.plan)}</button>.</p>
      )}
      {found.plans.length > 0 ? <Table found={found} shown={shown} /> : (
        <div class="fault"><strong>No plan fits.</strong>{found.nearest && <p>The nearest lacks: {found.nearest.reasons.join(", ")}.</p>}</div>
      )}
      <Notes notes={[...found.advice, ...found.notes]} />
      {near.length > 1 && <>
        <h3>Time against memory</h3>
        <p class="note">Joined: plans that no other beats in both. A click shows a plan.</p>
        <Scatter dots={near} capacity={capacity} says={`${near.length} plans by time and memory; ${found.pareto.length} are on the front`} />
      </>}
    </>
  );
};

const Arguments = ({ call, formula }: { call: Call; formula: Formula | undefined }) => (
  <div class="scroll" role="region" aria-label="Numbers put in" tabIndex={0}><table>
    <thead><tr><th>Symbol</th><th>Argument</th><th class="n">Value</th></tr></thead>
    <tbody>
      {Object.entries(call.arguments).map(([name, given]) => (
        <tr key={name}><td>{formula?.symbols[name] ?? ""}</td><th scope="row">{name}</th>
          <td class="n">{given && typeof given === "object" ? "fitted fabric" : quantity(name, given)}</td></tr>
      ))}
      {Object.entries(call.factors).map(([name, given]) => (
        <tr key={`x${name}`}><td>×</td><th scope="row">{name.replaceAll("_", " ")}</th><td class="n">{number(given)}</td></tr>
      ))}
    </tbody>
  </table></div>
);
const Term = ({ detail, formulas }: { detail: Detail; formulas: Formulas | null }) => {
  const formula = formulas?.[detail.function];
  return (
    <div class="term">
      {formula && <p>{formula.summary}</p>}
      {formula && <div class="math" role="region" aria-label="Formula" tabIndex={0} dangerouslySetInnerHTML={{ __html: formula.mathml }} />}
      <p class="note"><code>steptime.cost.{detail.function}</code></p>
      <Arguments call={detail} formula={formula} />
      {detail.further.map((call, i) => <div key={i}><p>plus <code>{call.function}</code> with</p><Arguments call={call} formula={formulas?.[call.function]} /></div>)}
      {formula?.source && <p class="note">Source: {formula.source}.</p>}
      {detail.basis && <p class="note">Rests on: {detail.basis}.</p>}
    </div>
  );
};

export const ExplainView = ({ found }: { found: Estimate }) => {
  const [formulas, setFormulas] = useState<Formulas | null>(null);
  const [all, setAll] = useState(false);
  useEffect(() => void allFormulas().then(setFormulas, () => undefined), []);
  const isMemory = (detail: Detail): boolean => detail.path in found.memory;
  const details = [...(found.details ?? [])].sort((a, b) => Number(isMemory(a)) - Number(isMemory(b)) || b.value - a.value);
  const wanted = state.value.term;
  const shown = all ? details : details.filter((detail) => detail.path === wanted || detail.value >= 0.005 * (isMemory(detail) ? found.peak_memory_bytes : found.step_time_s));
  return (
    <>
      <p>{brief(found.plan)}. The bottleneck is <strong>{found.bottleneck}</strong>. Every term has its formula, the numbers put in, and its source.</p>
      <Notes notes={found.notes} />
      {!details.length && <p class="note">The terms of this plan are not at hand{embedded ? " in this report" : ""}.</p>}
      <ul class="details">
        {shown.map((detail) => (
          <li key={detail.path}>
            <details open={detail.path === wanted} onToggle={(event) => {
              const open = event.currentTarget.open;
              if (open !== (state.value.term === detail.path)) go({ term: open ? detail.path : state.value.term === detail.path ? "" : state.value.term });
            }}>
              <summary><span class="path">{detail.path}</span><output>{isMemory(detail) ? bytes(detail.value) : seconds(detail.value)}</output></summary>
              {detail.path === wanted && <Term detail={detail} formulas={formulas} />}
            </details>
          </li>
        ))}
      </ul>
      {shown.length < details.length && <button type="button" class="plain" onClick={() => setAll(true)}>Show {details.length - shown.length} small terms</button>}
      <h3>Assumptions</h3>
      <Notes notes={[...found.provenance.assumptions, `band: ${found.provenance.band}`, `the weakest number is ${found.provenance.weakest_kind}`]} />
      <details>
        <summary>{Object.keys(found.provenance.constants).length} constants with their sources</summary>
        <div class="scroll" role="region" aria-label="Constants" tabIndex={0}><table>
          <thead><tr><th>Constant</th><th class="n">Value</th><th>Kind</th><th>Source</th></tr></thead>
          <tbody>{Object.entries(found.provenance.constants).map(([name, one]) => (
            <tr key={name}><th scope="row">{name}</th><td class="n">{quantity(name.replace(/^(.*flops_per_s).*/, "$1"), one.value)}</td><td>{one.kind}</td><td>{one.source}</td></tr>
          ))}</tbody>
        </table></div>
      </details>
    </>
  );
};

/** An answer that follows from the shown plan, asked for when a view opens and when the plan changes. */
const useAnswer = <T,>(question: string, body: unknown): { value: T | null; error: Problem | null } => {
  const [answer, setAnswer] = useState<{ value: T | null; error: Problem | null }>({ value: null, error: null });
  const key = JSON.stringify(body);
  useEffect(() => {
    if (!body) return;
    let current = true;
    ask<T>(question, body).then(
      (value) => current && setAnswer({ value, error: null }),
      (error: unknown) => current && !stopped(error) && setAnswer({ value: null, error: error instanceof Problem ? error : new Problem(String(error)) }),
    );
    return () => { current = false; stop(question); };
  }, [question, key]);
  return answer;
};

const OTHER = "This is not in the report: of its other plans it has the numbers alone.";
export const RooflineView = ({ found }: { found: Estimate }) => {
  const { value: drawn, error } = useAnswer<Chart>("roofline", asked({ job: job.value, plan: askable(found.plan) }));
  if (!isAtHand(found.plan)) return <p class="note">{OTHER}</p>;
  if (error) return <Fault error={error} />;
  const panel = drawn?.panels[0];
  if (!panel) return <p class="note">Weighing operators…</p>;
  const rows = panel.series.filter((one) => one.style === "points").flatMap((one) =>
    one.x.map((x, i) => ({ kind: one.name, name: one.labels[i] ?? "", x, y: one.y[i] ?? 0, share: one.size[i] ?? 0 })));
  rows.sort((a, b) => b.share - a.share);
  const named = rows.filter((row) => row.name);
  const rest = rows.filter((row) => !row.name);
  return (
    <>
      <p>Operators by their operations per byte of memory traffic, forward and backward together. On the slope memory bounds them, below the
        flat part the peak. The area is the share of their time.</p>
      <Roofline panel={panel} says={named.slice(0, 6).map((row) => `${row.name}: ${quantity("flops_per_s", row.y)}`).join(", ")} />
      <div class="scroll" role="region" aria-label="Operators" tabIndex={0}><table>
        <thead><tr><th>Operator</th><th>Runs on</th><th class="n">Operations per byte</th><th class="n">Rate</th><th class="n">Share of their time</th></tr></thead>
        <tbody>{named.map((row, i) => (
          <tr key={i}><th scope="row">{row.name.replace(/ \d+ %$/, "").replaceAll("_", " ")}</th><td><i class={`swatch ${row.kind === "matrix units" ? "k1" : "k2"}`} />{row.kind}</td><td class="n">{number(row.x)}</td>
            <td class="n">{quantity("flops_per_s", row.y)}</td><td class="n">{percent(row.share)}</td></tr>
        ))}
          {rest.length > 0 && <tr><th scope="row">{rest.length} smaller</th><td /><td /><td /><td class="n">{percent(rest.reduce((sum, row) => sum + row.share, 0))}</td></tr>}
        </tbody>
      </table></div>
    </>
  );
};

export const TimelineView = ({ found }: { found: Estimate }) => {
  const staged = Number(found.plan.pp) > 1;
  const { value: played, error } = useAnswer<Simulated>("simulate", staged ? asked({ job: job.value, plan: askable(found.plan) }) : null);
  if (!isAtHand(found.plan)) return <p class="note">{OTHER}</p>;
  if (!staged) return <p class="note">This plan has no pipeline: all devices do the same at the same time. Choose 2 pipeline stages or more to see a timeline.</p>;
  if (error) return <Fault error={error} />;
  if (!played) return <p class="note">Playing one step…</p>;
  return (
    <>
      <p>One step of <strong>{played.schedule}</strong>, played action by action: {seconds(played.step_time_s)}
        {played.closed_form_s ? ` (closed form ${seconds(played.closed_form_s)})` : ""}; ranks wait {percent(played.bubble_fraction)} of the pipeline.</p>
      <Gantt key={`${played.ranks}/${played.pipeline_s}`} found={played} />
      <Notes notes={played.notes} />
    </>
  );
};

export const MeshView = ({ found }: { found: Estimate }) => <Mesh estimate={found} cluster={job.value.clusterText ? null : clusterOf(job.value.cluster)} />;

const COUNTS = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8];
export const ScalingView = () => {
  const [points, setPoints] = useState<Scale[]>([]);
  const [said, setSaid] = useState("");
  const [error, setError] = useState<Problem | null>(null);
  const key = jobKey.value;
  useEffect(() => {
    let current = true;
    setPoints([]);
    setError(null);
    const run = async (): Promise<void> => {
      const sizes = [...new Set(COUNTS.map((factor) => Math.round(job.value.gpus * factor)).filter((n) => n >= 1))];
      const found: Scale[] = [];
      const none: number[] = [];
      for (const gpus of sizes) {
        if (!current) return;
        setSaid(`Searching ${count(gpus)} devices…`);
        try {
          const best = (await ask<Ranking>("plan", { ...asked({ job: { ...job.value, gpus }, plan: null }), top: 1 }, "scaling")).plans[0];
          if (best) found.push({ gpus, step_s: best.step_time_s, mfu: best.mfu, band: best.step_time_band_s });
          else none.push(gpus);
        } catch (fault) {
          if (stopped(fault)) return;
          if (!found.length && gpus === sizes.at(-1)) setError(fault as Problem);
          none.push(gpus);
        }
        if (current) setPoints([...found]);
      }
      if (current) setSaid(none.length ? `Nothing fits on ${none.join(", ")} devices.` : "");
    };
    const timer = setTimeout(() => void run(), 300);
    return () => { current = false; clearTimeout(timer); stop("scaling"); };
  }, [key]);
  const first = points[0];
  return (
    <>
      <p>Strong scaling: the same batch on more devices, the best plan at every count. Dashed: perfect scaling from the first.</p>
      {error && <Fault error={error} />}
      {points.length > 1 && <Scaling points={points} shown={job.value.gpus}
        says={points.map((p) => `${p.gpus} devices ${seconds(p.step_s)}`).join(", ")} />}
      <p class="note" aria-live="polite">{said}</p>
      {first && <div class="scroll" role="region" aria-label="Strong scaling" tabIndex={0}><table>
        <thead><tr><th>Devices</th><th class="n">Step</th><th class="n">Faster than the first</th><th class="n">MFU</th></tr></thead>
        <tbody>{points.map((p) => (
          <tr key={p.gpus} class={p.gpus === job.value.gpus ? "on" : ""}><th scope="row">{count(p.gpus)}</th><td class="n">{seconds(p.step_s)}</td>
            <td class="n">{(first.step_s / p.step_s).toFixed(2)} ×</td><td class="n">{percent(p.mfu)}</td></tr>
        ))}</tbody>
      </table></div>}
    </>
  );
};

const RANKS = ["tp", "cp", "pp"];
/** Values of a degree that a map has: those of ranks divide the devices. */
const valuesOf = (axis: string, gpus: number): number[] =>
  RANKS.includes(axis) ? divisors(gpus).filter((n) => n <= 64 && (n & (n - 1)) === 0) : doublings(16);
export const MapView = () => {
  const [axes, setAxes] = useState<[string, string]>(["tp", "pp"]);
  const [cells, setCells] = useState<Cell[]>([]);
  const [said, setSaid] = useState("");
  const key = jobKey.value;
  const { gpus } = job.value;
  const [xs, ys] = [valuesOf(axes[0], gpus), valuesOf(axes[1], gpus)];
  const ranks = axes.every((axis) => RANKS.includes(axis));
  useEffect(() => {
    let current = true;
    setCells([]);
    const run = async (): Promise<void> => {
      const found: Cell[] = [];
      const pairs = ys.flatMap((y) => xs.map((x) => [x, y] as const)).filter(([x, y]) => !ranks || gpus % (x * y) === 0);
      for (const [x, y] of pairs) {
        if (!current) return;
        setSaid(`${found.length} of ${pairs.length} searches…`);
        const place = `${axes[0]} ${x}, ${axes[1]} ${y}`;
        try {
          const fix = { [axes[0]]: x, [axes[1]]: y };
          const best = (await ask<Ranking>("plan", { ...asked({ job: job.value, plan: null }), fix, top: 1 }, "map")).plans[0];
          found.push(best
            ? { x, y, step_s: best.step_time_s, title: `${place}: ${brief(best.plan)}: ${seconds(best.step_time_s)}`, pick: () => setPlan(askable(best.plan), true) }
            : { x, y, step_s: null, title: `${place}: nothing fits` });
        } catch (fault) {
          if (stopped(fault)) return;
          found.push({ x, y, step_s: null, title: `${place}: ${(fault as Problem).message}` });
        }
        if (current) setCells([...found]);
      }
      if (current) setSaid("");
    };
    const timer = setTimeout(() => void run(), 300);
    return () => { current = false; clearTimeout(timer); stop("map"); };
  }, [key, axes.join()]);
  const fits = cells.filter((cell) => cell.step_s !== null);
  const pick = (at: 0 | 1, name: string): void => {
    const other = axes[1 - at] ?? "tp";
    const swapped = name === other ? axes[at] ?? "pp" : other;
    setAxes(at === 0 ? [name, swapped] : [swapped, name]);
  };
  return (
    <>
      <p>The step of the best plan for every pair of two degrees, all others free. The faster, the darker; framed: the fastest. A click shows the plan.</p>
      <div class="row choices">{([0, 1] as const).map((at) => (
        <label key={at} class="field"><span>{at ? "Up" : "Across"}</span>
          <select value={axes[at]} onChange={(event) => pick(at, event.currentTarget.value)}>
            {[...RANKS, "micro_batch"].map((name) => <option key={name} value={name} selected={name === axes[at]}>{name.replace("_", "-")}</option>)}
          </select></label>
      ))}</div>
      {fits.length > 0 && <HeatMap cells={cells} xs={xs} ys={ys} names={[axes[0].replace("_", "-"), axes[1].replace("micro_batch", "mbs")]}
        says={fits.map((cell) => `${axes[0]} ${cell.x}, ${axes[1]} ${cell.y}: ${seconds(cell.step_s ?? 0)}`).join("; ")} />}
      <p class="note" aria-live="polite">{said || (fits.length ? "" : cells.length ? "Nothing fits." : "")}</p>
    </>
  );
};

export const GuideView = () => {
  const { value: made, error } = useAnswer<Guide>("guide", asked({ job: { ...job.value, strategy: "auto", mode: "corrected" }, plan: null }));
  if (error) return <Fault error={error} />;
  if (!made) return <p class="note">Walking the questions…</p>;
  const show = (plan: Plan | null, title: string) =>
    plan && Number(plan.dp) > 0 && <button type="button" class="link" onClick={() => setPlan(askable(plan), true)}>{title}</button>;
  return (
    <>
      <p>The questions by which a plan is chosen by hand, each with its numbers, held against the exhaustive search.</p>
      <ol class="questions">
        {made.decisions.map((one) => (
          <li key={one.question}>
            <h3>{one.question} <strong>{one.answer}</strong></h3>
            <p>{one.because}{one.step_time_s ? `; a step takes ${seconds(one.step_time_s)}` : ""}</p>
            {one.turns && <p class="note">It would turn with {one.turns}.</p>}
          </li>
        ))}
      </ol>
      {made.shortcut && <p>By hand: {show(made.shortcut.plan, brief(made.shortcut.plan))}, {seconds(made.shortcut.step_time_s)}.
        {made.best && <> The search: {show(made.best.plan, brief(made.best.plan))}, {seconds(made.best.step_time_s)}.</>}</p>}
      <Notes notes={made.notes} />
    </>
  );
};

const HEADLINE: [string, string][] = [
  ["step_time_s", "Time of a step"], ["mfu", "MFU"], ["tokens_per_s_per_gpu", "Tokens per second and device"],
  ["peak_memory_bytes", "Peak memory"], ["feasible", "Fits"], ["bottleneck", "Bottleneck"],
];
const Delta = ({ pair, unit }: { pair: [number, number]; unit: (value: number) => string }) => (
  <><td class="n">{unit(pair[0])}</td><td class="n">{unit(pair[1])}</td><td class="n">{pair[0] ? change(pair[0], pair[1]) : ""}</td></>
);
export const CompareView = ({ found }: { found: Estimate }) => {
  const pinned = state.value.pinned;
  const now: Chosen = { job: job.value, plan: askable(found.plan) };
  const { value: made, error } = useAnswer<Difference>("diff", pinned ? { a: asked(pinned), b: asked(now) } : null);
  if (!pinned) return (
    <><p class="note">Keep this plan, then change a degree or choose another one: both are compared term by term.</p>
      <button type="button" class="main" onClick={() => go({ pinned: now }, true)}>Keep this plan as A</button></>
  );
  const big = (pairs: Record<string, [number, number]>): [string, [number, number]][] => {
    const most = Math.max(...Object.values(pairs).flat());
    return Object.entries(pairs).filter(([, [a, b]]) => Math.abs(a - b) > most * 1e-3).sort((x, y) => Math.abs(y[1][1] - y[1][0]) - Math.abs(x[1][1] - x[1][0])).slice(0, 14);
  };
  return (
    <>
      <p>A: {pinned.plan ? brief(pinned.plan) : "the best plan"}{" on "}{pinned.job.gpus} devices. B: {brief(now.plan ?? {})}{" on "}{now.job.gpus} devices.</p>
      <div class="row">
        <button type="button" onClick={() => go({ pinned: now })}>Keep B as the new A</button>
        <button type="button" class="plain" onClick={() => go({ job: pinned.job, plan: pinned.plan, pinned: now }, true)}>Swap A and B</button>
        <button type="button" class="plain" onClick={() => go({ pinned: null })}>End the comparison</button>
      </div>
      {error && <Fault error={error} />}
      {made && <div class="scroll" role="region" aria-label="Comparison" tabIndex={0}><table>
        <thead><tr><th /><th class="n">A</th><th class="n">B</th><th class="n">Change</th></tr></thead>
        <tbody>
          {HEADLINE.map(([key, title]) => {
            const pair = made.headline[key];
            if (!pair) return null;
            const unit = key === "mfu" ? (v: number) => percent(v) : (v: number) => quantity(key, v);
            return <tr key={key} class="strong"><th scope="row">{title}</th>{typeof pair[0] === "number" && typeof pair[1] === "number"
              ? <Delta pair={pair as [number, number]} unit={unit} /> : <><td class="n">{quantity(key, pair[0])}</td><td class="n">{quantity(key, pair[1])}</td><td /></>}</tr>;
          })}
          <tr class="head"><th colSpan={4} scope="rowgroup">What differs</th></tr>
          {Object.entries(made.plan).filter(([key]) => key !== "stage_layers").map(([key, pair]) => (
            <tr key={key}><th scope="row">{key.replaceAll("_", " ")}</th><td class="n">{placed(pair[0])}</td><td class="n">{placed(pair[1])}</td><td /></tr>
          ))}
          <tr class="head"><th colSpan={4} scope="rowgroup">Time, exposed</th></tr>
          {big(made.time).map(([path, pair]) => <tr key={path}><th scope="row">{path}</th><Delta pair={pair} unit={seconds} /></tr>)}
          <tr class="head"><th colSpan={4} scope="rowgroup">Memory</th></tr>
          {big(made.memory).map(([path, pair]) => <tr key={path}><th scope="row">{path}</th><Delta pair={pair} unit={bytes} /></tr>)}
        </tbody>
      </table></div>}
    </>
  );
};
export const current = (): Estimate | null => estimate.value.value;
