import { useEffect, useRef } from "preact/hooks";
import { ask, embedded, Problem } from "./api";
import { Span } from "./charts";
import { png, runToml, save } from "./download";
import { brief, bytes, change, count, days, percent, seconds } from "./format";
import { Degrees, JobForm } from "./form";
import { asked, askable, go, job, setPlan, state, VIEWS, type View } from "./state";
import type { Estimate } from "./types";
import { CompareView, current, ExplainView, Fault, GuideView, MemoryView, MapView, MeshView, PlansView, RooflineView, ScalingView, TimelineView, TimeView } from "./views";
import { choices, estimate, ranking } from "./work";

const TITLES: Record<View, string> = {
  plans: "Plans", time: "Time", memory: "Memory", explain: "Explain", roofline: "Roofline", timeline: "Timeline", mesh: "Mesh", map: "Map", scaling: "Scaling", guide: "Guide", compare: "Compare",
};

const Card = (props: { title: string; value: string; note: string; tone?: string }) => (
  <div class={`card ${props.tone ?? ""}`}><h3>{props.title}</h3><p class="big">{props.value}</p><p class="note">{props.note}</p></div>
);

const Headline = ({ found }: { found: Estimate }) => {
  const best = ranking.value.value?.plans[0];
  const changed = !!state.value.plan && !!best && JSON.stringify(askable(best.plan)) !== JSON.stringify(askable(found.plan));
  const run = found.training;
  const share = found.peak_memory_bytes / found.memory_capacity_bytes;
  return (
    <section class="headline" aria-label="Result" aria-busy={estimate.value.busy}>
      <div class="said">
        <h2>{brief(found.plan)}</h2>
        {!embedded && changed && best && (
          <p class="versus">{found.step_time_s > best.step_time_s ? `${change(best.step_time_s, found.step_time_s)} time against the best plan` : "as fast as the best plan"}
            {" "}<button type="button" class="link" onClick={() => setPlan(null, true)}>Show the best</button></p>
        )}
      </div>
      {!found.feasible && <div class="fault"><strong>This plan does not fit: {found.reasons.join(", ")}.</strong></div>}
      <div class="cards">
        <div class="card wide"><h3>Time of a step</h3><p class="big" data-testid="step">{seconds(found.step_time_s)}</p>
          <Span value={found.step_time_s} bracket={found.step_time_bracket_s} band={found.step_time_band_s} />
          <p class="note">{found.step_time_band_s ? "Shaded: 90 % of measured runs. " : ""}Line: everything overlapped to nothing overlapped.</p></div>
        <Card title="Utilisation (MFU)" value={percent(found.mfu)} note={`${count(found.tokens_per_s_per_gpu)} tokens per second and device`} />
        <Card title="Peak memory" value={bytes(found.peak_memory_bytes)} tone={share > 1 ? "bad" : ""}
          note={`${percent(share)} of ${bytes(found.memory_capacity_bytes)}; ${percent(found.oom_probability)} chance to run out`} />
        <Card title="Bottleneck" value={found.bottleneck.replace(/ \(.*/, "").replaceAll("_", " ")} note={`${/\((.*)\)/.exec(found.bottleneck)?.[1] ?? ""} of the step`} />
      </div>
      {run && <p data-testid="training">The whole run: <strong>{days(run.training_days)} days</strong>
        {run.training_band_days && ` (${run.training_band_days.map(days).join(" to ")})`}, {count(run.gpu_hours)} device hours ({count(run.gpu_days)} device days), {count(run.steps)} steps.</p>}
    </section>
  );
};

/** Views that have something to show: a report can ask nothing more. */
const SHOWN = VIEWS.filter((view) => !embedded || !["map", "scaling", "guide", "compare"].includes(view));

const Tabs = () => {
  const keys = (event: KeyboardEvent): void => {
    const at = SHOWN.indexOf(state.value.view);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: SHOWN.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const view = SHOWN[(to + SHOWN.length) % SHOWN.length] ?? "plans";
    go({ view });
    document.getElementById(`tab-${view}`)?.focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label="Views" onKeyDown={keys}>
      {SHOWN.map((view) => (
        <button key={view} type="button" role="tab" id={`tab-${view}`} aria-controls="view" aria-selected={state.value.view === view}
          tabIndex={state.value.view === view ? 0 : -1} onClick={() => go({ view }, true)}>{TITLES[view]}</button>
      ))}
    </div>
  );
};

const View = ({ found }: { found: Estimate | null }) => {
  const view = state.value.view;
  if (view === "plans") return <PlansView />;
  if (view === "guide") return <GuideView />;
  if (view === "scaling") return <ScalingView />;
  if (view === "map") return <MapView />;
  if (!found) return <p class="note">Nothing to show yet.</p>;
  const Shown = { time: TimeView, memory: MemoryView, explain: ExplainView, roofline: RooflineView, timeline: TimelineView, mesh: MeshView, compare: CompareView }[view];
  return <Shown found={found} />;
};

const Downloads = ({ found, view }: { found: Estimate; view: () => Element | null }) => {
  const menu = useRef<HTMLDetailsElement>(null);
  const now = { job: job.value, plan: askable(found.plan) };
  const name = `${found.provenance.model}-${found.workload.gpus}`;
  const trace = async (): Promise<void> => {
    const { chrome } = await ask<{ chrome: string }>("trace", asked(now));
    save(`${name}.trace.json`, chrome);
  };
  const items: [string, () => void | Promise<void>][] = [
    ["This plan (JSON)", () => save(`${name}.json`, JSON.stringify(found, null, 2))],
    ["All plans (JSON)", () => save(`${name}-plans.json`, JSON.stringify(ranking.value.value, null, 2))],
    ["Charts of this view (PNG)", () => png(view() ?? document.body, `${name}-${state.value.view}.png`)],
    ...(embedded ? [] : [["Trace for Perfetto", trace] as [string, () => Promise<void>]]),
    ["Run file (RUN.toml)", () => save("RUN.toml", runToml(now), "application/toml")],
  ];
  return (
    <details class="menu" ref={menu} onKeyDown={(event) => { if (event.key === "Escape" && menu.current) menu.current.open = false; }}>
      <summary>Download</summary>
      <ul>{items.map(([title, act]) => (
        <li key={title}><button type="button" onClick={() => {
          void Promise.resolve(act()).catch((error: unknown) => {
            estimate.value = { ...estimate.value, error: error instanceof Problem ? error : new Problem(String(error)) };
          });
          if (menu.current) menu.current.open = false;
        }}>{title}</button></li>
      ))}</ul>
    </details>
  );
};

const Busy = () => {
  const { busy, done, known } = ranking.value;
  if (!busy) return <p class="status note" role="status" />;
  return (
    <p class="status note" role="status">
      <progress {...(known ? { max: known, value: done } : {})} aria-label="Search" /> {known ? `${count(done)} of ${count(known)} plans` : "Searching…"}
    </p>
  );
};

export const App = () => {
  const found = current();
  const view = useRef<HTMLElement>(null);
  useEffect(() => {
    document.title = found ? `${seconds(found.step_time_s)} · ${found.provenance.model} on ${found.workload.gpus} · steptime` : "steptime";
  });
  const error = estimate.value.error;
  const pinned = state.value.pinned;
  const wide = typeof matchMedia === "function" && matchMedia("(min-width: 900px)").matches;
  return (
    <>
      <header class="top">
        <h1>steptime</h1>
        <p>What a training step costs before you run it, why, and how to make it cheaper.</p>
        <small>{choices.value?.version ?? found?.provenance.steptime_version}</small>
      </header>
      <div class={embedded ? "body report" : "body"}>
        {embedded ? null : <aside><details class="drawer" open={wide}><summary>Job: {job.value.modelText ? "pasted model" : job.value.model}, {job.value.gpus} devices</summary><JobForm /></details></aside>}
        <main>
          {embedded && found && <p class="lead">{found.provenance.model} on {String(found.workload.gpus)} devices of {found.provenance.cluster}, batch {String(found.workload.global_batch)},
            {" "}{String(found.workload.seq_len)} tokens, {String(found.workload.dtype)}, {found.provenance.framework}</p>}
          {error && <Fault error={error} />}
          {found ? <Headline found={found} /> : !error && <section class="headline empty"><Busy /></section>}
          <Degrees />
          <div class="bar">
            <Tabs />
            <div class="row actions">
              {found && !embedded && <button type="button" aria-pressed={!!pinned} onClick={() => go({ pinned: { job: job.value, plan: askable(found.plan) }, view: "compare" }, true)}>
                Keep as A</button>}
              {found && <Downloads found={found} view={() => view.current} />}
            </div>
          </div>
          {found && !embedded && <Busy />}
          <section class="view" id="view" role="tabpanel" aria-labelledby={`tab-${state.value.view}`} ref={view} tabIndex={-1}>
            <View found={found} />
          </section>
        </main>
      </div>
    </>
  );
};
