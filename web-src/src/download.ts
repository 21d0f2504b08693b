// What a person takes away: data, pictures, a trace, a run file.
import { asked, type Chosen } from "./state";
import type { Value } from "./types";

export const save = (name: string, content: Blob | string, type = "application/json"): void => {
  const blob = typeof content === "string" ? new Blob([content], { type }) : content;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
};

const PAINT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "font-weight"] as const;
/** A copy of a chart that needs no style sheet. */
const plainCopy = (svg: SVGSVGElement): SVGSVGElement => {
  const copy = svg.cloneNode(true) as SVGSVGElement;
  const originals = svg.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((element, i) => {
    const original = originals[i];
    if (!original) return;
    const style = getComputedStyle(original);
    for (const name of PAINT) {
      const value = style.getPropertyValue(name);
      if (value && !(name === "fill" && element.getAttribute("fill")?.startsWith("url"))) element.setAttribute(name, value);
    }
    element.removeAttribute("class");
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return copy;
};

const drawn = async (svg: SVGSVGElement): Promise<HTMLCanvasElement> => {
  const image = new Image();
  const url = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(plainCopy(svg))], { type: "image/svg+xml" }));
  image.src = url;
  await image.decode();
  URL.revokeObjectURL(url);
  const canvas = document.createElement("canvas");
  canvas.width = 2 * svg.clientWidth;
  canvas.height = 2 * svg.clientHeight;
  canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas;
};

/** The charts of a view below one another, as a PNG at twice their size. */
export const png = async (view: Element, name: string): Promise<void> => {
  const charts = [...view.querySelectorAll<SVGSVGElement | HTMLCanvasElement>("svg.chart, canvas.chart")];
  const pictures = await Promise.all(charts.map((chart) => (chart instanceof SVGSVGElement ? drawn(chart) : Promise.resolve(chart))));
  const margin = 24;
  const all = document.createElement("canvas");
  all.width = Math.max(0, ...pictures.map((picture) => picture.width)) + 2 * margin;
  all.height = pictures.reduce((sum, picture) => sum + picture.height + margin, margin);
  const context = all.getContext("2d");
  if (!context || !pictures.length) return;
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, all.width, all.height);
  let y = margin;
  for (const picture of pictures) {
    context.drawImage(picture, margin, y);
    y += picture.height + margin;
  }
  const blob = await new Promise<Blob | null>((done) => all.toBlob(done, "image/png"));
  if (blob) save(name, blob);
};

const toml = (value: unknown): string =>
  Array.isArray(value) ? `[${value.map(toml).join(", ")}]` : typeof value === "string" ? JSON.stringify(value) : String(value);

/** The RUN.toml of a job and its plan; a pasted text has to be saved next to it. */
export const runToml = (chosen: Chosen): string => {
  const { plan, ...settings } = asked(chosen) as Record<string, unknown> & { plan?: Record<string, Value> };
  const lines: string[] = [];
  for (const [key, value] of Object.entries(settings)) {
    const pasted = typeof value === "object" && value !== null && "text" in value;
    const ending = pasted && key === "model" && String((value as { text: string }).text).trimStart().startsWith("{") ? "json" : "toml";
    lines.push(pasted ? `${key} = "${key}.${ending}"  # save the pasted text under this name` : `${key} = ${toml(value)}`);
  }
  if (plan) {
    lines.push("", "[plan]");
    const tables = Object.entries(plan).filter(([, value]) => typeof value === "object" && !Array.isArray(value));
    for (const [key, value] of Object.entries(plan)) {
      if (typeof value !== "object" || Array.isArray(value)) lines.push(`${key} = ${toml(value)}`);
    }
    for (const [key, table] of tables) {
      lines.push("", `[plan.${key}]`, ...Object.entries(table ?? {}).map(([axis, n]) => `${axis} = ${n}`));
    }
  }
  return `${lines.join("\n")}\n`;
};
