// Questions to the server, or to the data that a report has within it.
import type { Formulas } from "./types";

export class Problem extends Error {
  constructor(message: string, readonly hint: string | null = null) {
    super(message);
  }
}
type Answers = Record<string, unknown>;
const element = document.getElementById("steptime-data");
/** What a report has: answers by question, and the fragment that describes it. */
export const embedded: { answers: Answers; fragment: string } | null = element ? JSON.parse(element.textContent ?? "") : null;

const refused = async (response: Response): Promise<Problem> => {
  try {
    const { error } = (await response.json()) as { error: { message: string; hint: string | null } };
    return new Problem(error.message, error.hint);
  } catch {
    return new Problem(`the server answered ${response.status}`, "is steptime serve still running?");
  }
};
const sent = async (path: string, init: RequestInit): Promise<Response> => {
  try {
    return await fetch(path, init);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Problem("the server does not answer", "start it again: steptime serve");
  }
};

const running = new Map<string, AbortController>();
/** An answer; a further question of the same lane ends the one before it. */
export const ask = async <T>(
  question: string, body: unknown, lane = question, progress?: (done: number, known: number) => void,
): Promise<T> => {
  running.get(lane)?.abort();
  if (embedded) {
    if (question in embedded.answers) return embedded.answers[question] as T;
    throw new Problem("this is not in the report", "steptime serve answers it");
  }
  const control = new AbortController();
  running.set(lane, control);
  const response = await sent(`api/${question}`, {
    method: "POST",
    headers: { "content-type": "application/json", accept: progress ? "text/event-stream" : "application/json" },
    body: JSON.stringify(body),
    signal: control.signal,
  });
  if (!response.ok) throw await refused(response);
  return progress ? events<T>(response, progress) : ((await response.json()) as T);
};
export const stop = (lane: string): void => running.get(lane)?.abort();
export const stopped = (error: unknown): boolean => error instanceof DOMException && error.name === "AbortError";

const events = async <T>(response: Response, progress: (done: number, known: number) => void): Promise<T> => {
  if (!response.body) throw new Problem("the answer is empty");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Problem("the answer ended early", "ask again");
    held += value;
    for (let end = held.indexOf("\n\n"); end >= 0; end = held.indexOf("\n\n")) {
      const [event = "", data = ""] = held.slice(0, end).split("\n");
      held = held.slice(end + 2);
      const found = JSON.parse(data.replace(/^data: /, ""));
      if (event === "event: progress") progress(found.done, found.known);
      else if (event === "event: error") throw new Problem(found.error.message, found.error.hint);
      else return found as T;
    }
  }
};

export const got = async <T>(path: string): Promise<T> => {
  if (embedded) {
    if (path in embedded.answers) return embedded.answers[path] as T;
    throw new Problem("this is not in the report");
  }
  const response = await sent(path, {});
  if (!response.ok) throw await refused(response);
  return (await response.json()) as T;
};
let formulas: Promise<Formulas> | null = null;
export const allFormulas = (): Promise<Formulas> => (formulas ??= got<Formulas>("formulas.json"));
