// Mesh map: how the axes of a plan lie in fast domains; a square is a device, its letter row the rank of each axis.
import { Figure } from "./charts";
import type { Cluster, Estimate } from "./types";

const AXES = ["tp", "tp2", "cp", "dp", "pp"] as const;
const TITLES: Record<string, string> = { tp: "tensor", tp2: "second tensor axis", cp: "context", dp: "data", pp: "pipeline" };
const COLOURS: Record<string, string> = { tp: "k3", tp2: "k3", cp: "k4", dp: "k6", pp: "k7" };
const MOST = 8;

export const Mesh = ({ estimate, cluster }: { estimate: Estimate; cluster: Cluster | null }) => {
  const plan = estimate.plan;
  const inside = (plan.placement ?? {}) as Record<string, number>;
  const degree = (axis: string): number => Number(plan[axis] ?? 1);
  const within = (axis: string): number => Number(inside[axis] ?? 1);
  const axes = AXES.filter((axis) => degree(axis) > 1);
  const used = axes.reduce((product, axis) => product * within(axis), 1);
  const domains = Number(plan.domains ?? 1);
  const level = cluster?.levels[0];
  const size = Math.max(used, level?.devices ?? used);
  const shown = Math.min(domains, MOST);
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
  if (rows > 12) return <p class="note">{says}.</p>;
  return (
    <>
      <p>
        {level ? `A fast domain (${level.name}) has ${size} ${size === 1 ? "device" : "devices"}. ` : ""}
        {domains > 1 ? `The job spans ${domains} of them${domains > shown ? `; the first ${shown} are drawn` : ""}.` : "The job lies within one."}
      </p>
      <Figure name="mesh" says={says} height={Math.ceil(shown / 2) * (rows * 44 + 38) + 4}>
        {(width) => {
          const across = width > 700 ? 2 : 1;
          const box = width / across - 12;
          const side = Math.min(72, (box - 12) / columns);
          return Array.from({ length: across === 2 ? shown : Math.min(shown, Math.ceil(shown / 2)) }, (_, domain) => {
            const [left, top] = [(domain % across) * (box + 12), Math.floor(domain / across) * (rows * 44 + 38)];
            return (
              <g key={domain}>
                <rect class="domain" x={left + 1} y={top + 1} width={box} height={rows * 44 + 28} rx="8" />
                <text class="small" x={left + 10} y={top + 17}>
                  {[`domain ${domain}`, ...outer.filter((axis) => within(axis) === 1).map((axis) => `${axis} ${place(domain, 0)[axis]}`)].join(" · ")}
                </text>
                {Array.from({ length: size }, (_, device) => {
                  const [x, y] = [left + 8 + (device % columns) * side, top + 24 + Math.floor(device / columns) * 44];
                  const idle = device >= used;
                  const at = place(domain, device);
                  const shade = inner[0] ? COLOURS[inner[0]] : "k1";
                  return (
                    <g key={device}>
                      <title>{idle ? "idle" : `device ${device}: ${axes.map((axis) => `${axis} rank ${at[axis]}`).join(", ") || "whole model"}`}</title>
                      <rect class={`fill ${idle ? "idle" : shade}`} x={x} y={y} width={side - 4} height={40} rx="4" />
                      {!idle && side > 34 && inner.slice(0, 2).map((axis, i) => (
                        <text key={axis} class="on" x={x + side / 2 - 2} y={y + (inner.length > 1 ? 17 : 25) + 15 * i} text-anchor="middle">{axis} {at[axis]}</text>
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
                <th scope="row"><i class={`swatch ${COLOURS[axis]}`} />{TITLES[axis]} ({axis})</th>
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
