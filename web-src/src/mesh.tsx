// Mesh map: how the axes of a plan lie in fast domains; a square is a device with its rank on each axis, its colour the stage.
import { useState } from "preact/hooks";
import { Figure } from "./charts";
import { count } from "./format";
import type { Cluster, Estimate } from "./types";

const AXES = ["tp", "tp2", "cp", "dp", "pp"] as const;
const TITLES: Record<string, string> = { tp: "tensor", tp2: "second tensor axis", cp: "context", dp: "data", pp: "pipeline" };
const [FEW, MOST] = [8, 64];

export const Mesh = ({ estimate, cluster }: { estimate: Estimate; cluster: Cluster | null }) => {
  const plan = estimate.plan;
  const [most, setMost] = useState(FEW);
  const inside = (plan.placement ?? {}) as Record<string, number>;
  const degree = (axis: string): number => Number(plan[axis] ?? 1);
  const within = (axis: string): number => Number(inside[axis] ?? 1);
  const axes = AXES.filter((axis) => degree(axis) > 1);
  const used = axes.reduce((product, axis) => product * within(axis), 1);
  const domains = Number(plan.domains ?? 1);
  const level = cluster?.levels[0];
  const size = Math.max(used, level?.devices ?? used);
  const shown = Math.min(domains, most);
  const columns = Math.min(size, 8);
  const rows = Math.ceil(size / columns);
  /** Rank along each axis of a device of a domain: axes inside first, then those across, in the order of launchers. */
  const place = (domain: number, device: number): Record<string, number> => {
    const out: Record<string, number> = {};
    for (const axis of axes) {
      const across = degree(axis) / within(axis);
      out[axis] = (device % within(axis)) + (domain % across) * within(axis);
      device = Math.floor(device / within(axis));
      domain = Math.floor(domain / across);
    }
    return out;
  };
  const outer = axes.filter((axis) => within(axis) < degree(axis));
  const inner = axes.filter((axis) => within(axis) > 1);
  const says = `${domains} fast domains of ${size} devices; inside a domain: ${
    inner.map((axis) => `${axis} ${within(axis)}`).join(", ") || "no axis"}`;
  const tall = Math.max(40, 10 + 15 * inner.length);
  const apart = tall + 4;
  if (rows > 12) return <p class="note">{says}.</p>;
  return (
    <>
      <p>
        {level ? `A fast domain (${level.name}) has ${size} ${size === 1 ? "device" : "devices"}. ` : ""}
        {domains > 1 ? `The job spans ${count(domains)} of them, ${count(domains * used)} devices${domains > shown ? `; the first ${shown} are drawn` : ""}.` : "The job lies within one."}
        {degree("pp") > 1 && " The colours are the stages of the pipeline."}
        {domains > FEW && <>{" "}<label>Draw <input class="few" type="number" min={1} max={Math.min(MOST, domains)} value={shown} aria-label="Fast domains that are drawn"
          onInput={(event) => { const n = Math.floor(Number(event.currentTarget.value)); if (n >= 1) setMost(Math.min(n, MOST)); }} /> of them</label></>}
      </p>
      <Figure name="mesh" says={says} height={(width) => Math.ceil(shown / (width > 700 ? 2 : 1)) * (rows * apart + 38) + 4}>
        {(width) => {
          const across = width > 700 ? 2 : 1;
          const box = width / across - 12;
          const side = Math.min(72, (box - 12) / columns);
          return Array.from({ length: shown }, (_, domain) => {
            const [left, top] = [(domain % across) * (box + 12), Math.floor(domain / across) * (rows * apart + 38)];
            return (
              <g key={domain}>
                <rect class="domain" x={left + 1} y={top + 1} width={box} height={rows * apart + 28} rx="8" />
                <text class="small" x={left + 10} y={top + 17}>
                  {[`domain ${domain}`, ...outer.filter((axis) => within(axis) === 1).map((axis) => `${axis} ${place(domain, 0)[axis]}`)].join(" · ")}
                </text>
                {Array.from({ length: size }, (_, device) => {
                  const [x, y] = [left + 8 + (device % columns) * side, top + 24 + Math.floor(device / columns) * apart];
                  const idle = device >= used;
                  const at = place(domain, device);
                  const shade = `k${((at.pp ?? 0) % 12) + 1}`;
                  return (
                    <g key={device}>
                      <title>{idle ? "idle" : `device ${device}: ${axes.map((axis) => `${axis} rank ${at[axis]}`).join(", ") || "whole model"}`}</title>
                      <rect class={`fill ${idle ? "idle" : shade}`} x={x} y={y} width={side - 4} height={tall} rx="4" />
                      {!idle && side > 34 && inner.map((axis, i) => (
                        <text key={axis} class="on" x={x + side / 2 - 2} y={y + tall / 2 + 4.5 + 15 * (i - (inner.length - 1) / 2)} text-anchor="middle">{axis} {at[axis]}</text>
                      ))}
                    </g>
                  );
                })}
              </g>
            );
          });
        }}
      </Figure>
      <div class="scroll" role="region" aria-label="Axes of the mesh" tabIndex={0}>
        <table>
          <thead><tr><th>Axis</th><th class="n">Ranks</th><th class="n">Inside a fast domain</th><th class="n">Across domains</th></tr></thead>
          <tbody>
            {axes.map((axis) => (
              <tr key={axis}>
                <th scope="row">{TITLES[axis]} ({axis})</th>
                <td class="n">{degree(axis)}</td><td class="n">{within(axis)}</td><td class="n">{degree(axis) / within(axis)}</td>
              </tr>
            ))}
            {!axes.length && <tr><td colSpan={4}>One device, no axis.</td></tr>}
          </tbody>
        </table>
      </div>
    </>
  );
};
