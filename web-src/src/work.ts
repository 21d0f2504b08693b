// Which questions follow from the state, and their answers as signals.
import { batch, computed, effect, signal, untracked } from "@preact/signals";
import { ask, embedded, got, Problem, stop, stopped } from "./api";
import { asked, askable, jobKey, state } from "./state";
import type { Choices, Estimate, Plan, Ranking } from "./types";

export interface Work<T> {
  value: T | null;
  error: Problem | null;
  busy: boolean;
  done: number;
  known: number;
}
const idle = { value: null, error: null, busy: false, done: 0, known: 0 };
export const choices = signal<Choices | null>(null);
export const ranking = signal<Work<Ranking>>(idle);
export const estimate = signal<Work<Estimate>>(idle);
/** Plans that are asked for: a few, so that the best is there at once; then enough for a scatter that shows the space. */
const [FIRST, TOP] = [12, 80];

const problem = (error: unknown): Problem => (error instanceof Problem ? error : new Problem(String(error)));

const rank = async (): Promise<void> => {
  ranking.value = { ...ranking.value, busy: true, error: null, done: 0, known: 0 };
  try {
    const question = { ...asked({ job: state.value.job, plan: null }), top: FIRST };
    const found = await ask<Ranking>("plan", question, "plan", (done, known) => {
      ranking.value = { ...ranking.value, done, known };
    });
    batch(() => {
      ranking.value = { ...idle, value: found };
      // The best plan is shown before its terms are asked for.
      if (!state.value.plan && found.plans[0]) estimate.value = { ...idle, value: found.plans[0] };
    });
    if (!embedded && found.plans.length === FIRST) {
      ranking.value = { ...idle, value: await ask<Ranking>("plan", { ...question, top: TOP }) };
    }
  } catch (error) {
    if (!stopped(error)) ranking.value = { ...idle, error: problem(error) };
  }
};

/** The plan that is shown: the chosen one, else the best of the search, else the one that lacks least. */
export const shownPlan = (): Plan | null => {
  if (state.value.plan) return state.value.plan;
  const found = ranking.value.value;
  const best = found?.plans[0] ?? found?.nearest;
  return best ? askable(best.plan) : null;
};

const explain = async (): Promise<void> => {
  const plan = shownPlan();
  if (!plan) {
    estimate.value = { ...idle, error: ranking.value.error };
    return;
  }
  const row = embedded && ofReport(plan);
  if (row) {
    estimate.value = { ...idle, value: row };
    return;
  }
  estimate.value = { ...estimate.value, busy: true };
  try {
    const found = await ask<Estimate>("estimate", {
      ...asked({ job: state.value.job, plan }), explain: true, ...(state.value.job.tokens ? { training: { tokens: state.value.job.tokens } } : {}),
    });
    estimate.value = { ...idle, value: found };
  } catch (error) {
    if (!stopped(error)) estimate.value = { ...idle, value: estimate.value.value, error: problem(error) };
  }
};

/** Whether a report has everything about a plan; of its ranked plans it has the estimates alone. */
export const isAtHand = (plan: Plan): boolean => !embedded || ofReport(askable(plan)) === null;
/** A plan of the report's ranking; null: it is the one that the report is about. */
const ofReport = (plan: Plan): Estimate | null => {
  const key = JSON.stringify(plan);
  const own = embedded?.answers.estimate as Estimate | undefined;
  if (own && JSON.stringify(askable(own.plan)) === key) return null;
  return ranking.value.value?.plans.find((row) => JSON.stringify(askable(row.plan)) === key) ?? null;
};

/** Job and plan of the estimate that is wanted; empty while the best plan is being searched. */
const wanted = computed(() => {
  const plan = state.value.plan;
  if (!plan && ranking.value.busy) return "";
  return `${jobKey.value}${state.value.job.tokens}${JSON.stringify(shownPlan())}${ranking.value.error ? "!" : ""}`;
});

/** Ask for what changed: a search when the job does, an estimate when job or plan do. */
export const begin = (): void => {
  let timer = 0;
  let first = true;
  effect(() => {
    void jobKey.value;
    clearTimeout(timer);
    stop("plan");
    untracked(() => (ranking.value = { ...ranking.value, busy: !embedded }));
    timer = window.setTimeout(() => void rank(), first ? 0 : 300);
    first = false;
  });
  effect(() => {
    if (wanted.value) untracked(() => void explain());
  });
  // The lists of the form can wait for the first result.
  effect(() => {
    if (!ranking.value.busy && !choices.peek()) {
      void got<Choices>("api/choices").then((found) => (choices.value = found), () => undefined);
    }
  });
};
