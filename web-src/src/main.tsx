import { render } from "preact";
import { App } from "./app";
import { embedded } from "./api";
import { askable, fromFragment, state } from "./state";
import type { Estimate } from "./types";
import { begin } from "./work";
import "./style.css";

/** The state of the address; a report starts at the plan that it is about. */
const start = (): void => {
  const found = fromFragment(location.hash || embedded?.fragment || "");
  const own = embedded?.answers.estimate as Estimate | undefined;
  state.value = own && !found.plan ? { ...found, plan: askable(own.plan) } : found;
};
start();
window.addEventListener("popstate", start);
begin();
const root = document.getElementById("page");
if (root) {
  root.textContent = "";
  render(<App />, root);
}
