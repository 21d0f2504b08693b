// Charts as SVG: every mark has a title, every chart a sentence that says what it shows.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { bytes, number, percent, quantity, seconds, type Part } from "./format";
import type { Panel } from "./types";

/** Width of an element in pixels, as it changes. */
export const useWidth = (): [(element: HTMLElement | null) => void, number] => {
  const [width, setWidth] = useState(640);
  const [element, setElement] = useState<HTMLElement | null>(null);
  useEffect(() => {
    if (!element) return;
    const watch = new ResizeObserver((entries) => setWidth(Math.max(240, Math.floor(entries[0]?.contentRect.width ?? 640))));
    watch.observe(element);
    return () => watch.disconnect();
  }, [element]);
  return [setElement, width];
};

export const Figure = (props: {
  name: string; says: string; height: number | ((width: number) => number); children: (width: number) => ComponentChildren;
}) => {
  const [ref, width] = useWidth();
  const height = typeof props.height === "number" ? props.height : props.height(width);
  return (
    <div class="figure" ref={ref}>
      <svg class="chart" role="img" aria-label={props.says} data-name={props.name} width={width} height={height}
        viewBox={`0 0 ${width} ${height}`}>
        <defs>
          <pattern id={`hatch-${props.name}`} width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
            <rect class="hatch" width="3" height="6" />
          </pattern>
        </defs>
        {props.children(width)}
      </svg>
    </div>
  );
};

/** One stacked bar from 0 to `full`, its parts named where they have room. */
export const Stack = (props: {
  parts: Part[]; full: number; x: number; y: number; width: number; height: number; unit: (value: number) => string; hatch?: string;
}) => {
  let at = props.x;
  const total = props.parts.reduce((sum, part) => sum + part.value, 0);
  return (
    <g>
      {props.parts.map((part) => {
        const wide = (part.value / props.full) * props.width;
        const left = at;
        at += wide;
        const says = `${part.title}: ${props.unit(part.value)}`;
        return (
          <g key={part.name}>
            <title>{says}</title>
            <rect class={`fill ${part.colour}`} x={left} y={props.y} width={Math.max(wide - 1, 0.5)} height={props.height} rx="2" />
            {props.hatch && <rect x={left} y={props.y} width={Math.max(wide - 1, 0.5)} height={props.height} fill={`url(#${props.hatch})`} />}
            {wide > 46 && <text class="on" x={left + wide / 2} y={props.y + props.height / 2 + 4} text-anchor="middle">
              {percent(part.value / total)}
            </text>}
          </g>
        );
      })}
    </g>
  );
};

const round = (value: number): number => {
  const power = 10 ** Math.floor(Math.log10(value));
  return ([1, 2, 5, 10].find((n) => n * power >= value) ?? 10) * power;
};
/** Some four round numbers from 0 to above `high`. */
export const ticks = (high: number, low = 0, some = 4): number[] => {
  const step = round((high - low) / some || 1);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.max(0, Math.floor(high / step) - first + 1) }, (_, i) => (first + i) * step);
};
/** Round numbers between two on a logarithmic axis. */
const decades = (low: number, high: number): number[] => {
  const all = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const n of [1, 2, 5]) all.push(n * 10 ** power);
  }
  const found = all.filter((n) => n >= low && n <= high);
  return found.length > 1 ? found : [low, high];
};

/** Where a step lies within its bracket and its band. */
export const Span = (props: { value: number; bracket: [number, number]; band: [number, number] | null }) => {
  const ends = [...props.bracket, ...(props.band ?? []), props.value];
  const low = Math.min(...ends);
  const high = Math.max(...ends);
  const pad = (high - low) * 0.06 || high * 0.02;
  const says = `step ${seconds(props.value)}; between ${seconds(props.bracket[0])} with everything overlapped and ${
    seconds(props.bracket[1])} with nothing overlapped${
    props.band ? `; 90 % of measured runs would lie between ${seconds(props.band[0])} and ${seconds(props.band[1])}` : ""}`;
  return (
    <Figure name="span" says={says} height={44}>
      {(width) => {
        const x = (value: number): number => 2 + ((value - low + pad) / (high - low + 2 * pad)) * (width - 4);
        return (
          <>
            {props.band && <rect class="band" x={x(props.band[0])} y={8} width={x(props.band[1]) - x(props.band[0])} height={12} rx="6" />}
            <line class="bracket" x1={x(props.bracket[0])} x2={x(props.bracket[1])} y1={14} y2={14} />
            {props.bracket.map((end) => <line class="bracket" key={end} x1={x(end)} x2={x(end)} y1={9} y2={19} />)}
            <circle class="mark" cx={x(props.value)} cy={14} r={6} />
            <text class="small" x={0} y={38}>{seconds(low)}</text>
            <text class="small" x={width} y={38} text-anchor="end">{seconds(high)}</text>
          </>
        );
      }}
    </Figure>
  );
};

export interface Dot {
  x: number;
  y: number;
  title: string;
  front: boolean;
  shown: boolean;
  pick?: () => void;
}
/** Memory against time of plans; the front is joined, plans above the capacity do not exist here. */
export const Scatter = (props: { dots: Dot[]; capacity: number; says: string }) => (
  <Figure name="design-space" says={props.says} height={280}>
    {(width) => {
      const left = 62;
      const top = 10;
      const bottom = 44;
      const inner = [width - left - 12, 280 - top - bottom] as const;
      const xs = props.dots.map((dot) => dot.x);
      const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
      const wide = x1 - x0 || x1 * 0.1;
      const high = props.capacity * 1.04;
      const x = (value: number): number => left + ((value - x0 + wide * 0.03) / (wide * 1.06)) * inner[0];
      const y = (value: number): number => top + (1 - value / high) * inner[1];
      const front = props.dots.filter((dot) => dot.front).sort((a, b) => a.x - b.x);
      const unit = 2 ** 30;
      const steps = Math.max(1, Math.floor(inner[0] / 80));
      return (
        <>
          {ticks(props.capacity / unit).map((tick) => (
            <g key={tick}>
              <line class="grid" x1={left} x2={width - 12} y1={y(tick * unit)} y2={y(tick * unit)} />
              <text class="small" x={left - 6} y={y(tick * unit) + 4} text-anchor="end">{tick}</text>
            </g>
          ))}
          {ticks(x1, x0, steps).map((tick) => (
            <text key={tick} class="small" x={x(tick)} y={280 - bottom + 18} text-anchor="middle">{seconds(tick)}</text>
          ))}
          <text class="axis" x={left + inner[0] / 2} y={276} text-anchor="middle">time of a step</text>
          <text class="axis" x={14} y={top + inner[1] / 2} text-anchor="middle"
            transform={`rotate(-90 14 ${top + inner[1] / 2})`}>peak memory, GiB</text>
          <line class="limit" x1={left} x2={width - 12} y1={y(props.capacity)} y2={y(props.capacity)} />
          <text class="small" x={width - 14} y={y(props.capacity) + 14} text-anchor="end">capacity {bytes(props.capacity)}</text>
          <path class="front" d={front.map((dot, i) => `${i ? `H${x(dot.x)}V${y(dot.y)}` : `M${x(dot.x)} ${y(dot.y)}`}`).join("")} />
          {props.dots.map((dot, i) => (
            <circle key={i} class={`dot${dot.front ? " on-front" : ""}${dot.shown ? " shown" : ""}`} cx={x(dot.x)} cy={y(dot.y)}
              r={dot.shown ? 7 : dot.front ? 5 : 3.5} onClick={dot.pick}>
              <title>{dot.title}</title>
            </circle>
          ))}
        </>
      );
    }}
  </Figure>
);

export interface Scale {
  gpus: number;
  step_s: number;
  mfu: number;
  band: [number, number] | null;
}
/** Step time over devices on two logarithmic axes, with the line that a perfect scaling would keep. */
export const Scaling = (props: { points: Scale[]; shown: number; says: string }) => (
  <Figure name="strong-scaling" says={props.says} height={300}>
    {(width) => {
      const [left, top, bottom] = [70, 14, 46];
      const inner = [width - left - 20, 300 - top - bottom] as const;
      const first = props.points[0];
      if (!first) return null;
      const ideal = (gpus: number): number => (first.step_s * first.gpus) / gpus;
      const last = props.points.at(-1) ?? first;
      const lows = props.points.map((p) => Math.min(p.step_s, p.band?.[0] ?? p.step_s, ideal(p.gpus)));
      const highs = props.points.map((p) => Math.max(p.step_s, p.band?.[1] ?? p.step_s));
      const [x0, x1] = [Math.log2(first.gpus), Math.log2(last.gpus)];
      const [y0, y1] = [Math.log(Math.min(...lows)), Math.log(Math.max(...highs))];
      const x = (gpus: number): number => left + (x1 > x0 ? (Math.log2(gpus) - x0) / (x1 - x0) : 0.5) * inner[0];
      const y = (s: number): number => top + (1 - (Math.log(s) - y0) / (y1 - y0 || 1)) * inner[1];
      const path = (of: (p: Scale) => number): string => props.points.map((p, i) => `${i ? "L" : "M"}${x(p.gpus)} ${y(of(p))}`).join("");
      const area = `${path((p) => p.band?.[1] ?? p.step_s)}${[...props.points].reverse().map((p) => `L${x(p.gpus)} ${y(p.band?.[0] ?? p.step_s)}`).join("")}Z`;
      return (
        <>
          {decades(Math.exp(y0), Math.exp(y1)).map((tick) => (
            <g key={tick}>
              <line class="grid" x1={left} x2={width - 20} y1={y(tick)} y2={y(tick)} />
              <text class="small" x={left - 6} y={y(tick) + 4} text-anchor="end">{seconds(tick)}</text>
            </g>
          ))}
          <path class="band" d={area} />
          <path class="ideal" d={path((p) => ideal(p.gpus))} />
          <path class="line" d={path((p) => p.step_s)} />
          {props.points.map((p) => (
            <g key={p.gpus}>
              <circle class={`dot on-front${p.gpus === props.shown ? " shown" : ""}`} cx={x(p.gpus)} cy={y(p.step_s)} r="5">
                <title>{`${p.gpus} devices: ${seconds(p.step_s)}, MFU ${percent(p.mfu)}`}</title>
              </circle>
              <text class="small" x={x(p.gpus)} y={300 - bottom + 18} text-anchor="middle">{p.gpus}</text>
            </g>
          ))}
          <text class="axis" x={left + inner[0] / 2} y={296} text-anchor="middle">devices</text>
          <text class="axis" x={14} y={top + inner[1] / 2} text-anchor="middle"
            transform={`rotate(-90 14 ${top + inner[1] / 2})`}>time of a step</text>
        </>
      );
    }}
  </Figure>
);

/** A chart of rules and points on two logarithmic axes, as the API describes it. */
export const Roofline = (props: { panel: Panel; says: string }) => (
  <Figure name="roofline" says={props.says} height={340}>
    {(width) => {
      const [left, top, bottom] = [82, 12, 46];
      const inner = [width - left - 14, 340 - top - bottom] as const;
      const all = (axis: "x" | "y"): number[] => props.panel.series.flatMap((one) => one[axis]);
      const [x0, x1] = [Math.log(Math.min(...all("x"))), Math.log(Math.max(...all("x")))];
      const [y0, y1] = [Math.log(Math.min(...all("y"))), Math.log(Math.max(...all("y")) * 2)];
      const x = (value: number): number => left + ((Math.log(value) - x0) / (x1 - x0 || 1)) * inner[0];
      const y = (value: number): number => top + (1 - (Math.log(value) - y0) / (y1 - y0 || 1)) * inner[1];
      const powers = (low: number, high: number): number[] =>
        Array.from({ length: 40 }, (_, i) => 10 ** (i - 12)).filter((n) => n >= Math.exp(low) && n <= Math.exp(high));
      const rules = props.panel.series.filter((one) => one.style === "rule");
      const points = props.panel.series.filter((one) => one.style === "points");
      return (
        <>
          {powers(y0, y1).map((tick) => (
            <g key={tick}>
              <line class="grid" x1={left} x2={width - 14} y1={y(tick)} y2={y(tick)} />
              <text class="small" x={left - 6} y={y(tick) + 4} text-anchor="end">{quantity("flops_per_s", tick)}</text>
            </g>
          ))}
          {powers(x0, x1).map((tick) => <text key={tick} class="small" x={x(tick)} y={340 - bottom + 18} text-anchor="middle">{number(tick)}</text>)}
          {rules.map((rule, i) => (
            <g key={rule.name}>
              <path class={i ? "ideal" : "line"} d={rule.x.map((at, n) => `${n ? "L" : "M"}${x(at)} ${y(rule.y[n] ?? 1)}`).join("")} />
              <text class="small" x={width - 16} y={y(rule.y.at(-1) ?? 1) - 6} text-anchor="end">{rule.name}</text>
            </g>
          ))}
          {points.map((one, i) => one.x.map((at, n) => (
            <circle key={`${i}/${n}`} class={`fill ${one.name === "matrix units" ? "k1" : "k2"} share`} cx={x(at)} cy={y(one.y[n] ?? 1)} r={Math.max(3, 26 * Math.sqrt(one.size[n] ?? 0))}>
              <title>{`${one.labels[n] || one.name}: ${number(at)} operations per byte, ${quantity("flops_per_s", one.y[n])}, ${percent(one.size[n] ?? 0)} of the time`}</title>
            </circle>
          )))}
          <text class="axis" x={left + inner[0] / 2} y={336} text-anchor="middle">{props.panel.x.label}</text>
        </>
      );
    }}
  </Figure>
);

export interface Cell {
  x: number;
  y: number;
  step_s: number | null;
  title: string;
  pick?: () => void;
}
/** Step times over two degrees: the faster the darker, on a logarithmic scale; a place without a plan is empty. */
export const HeatMap = (props: { cells: Cell[]; xs: number[]; ys: number[]; names: [string, string]; says: string }) => (
  <Figure name="map" says={props.says} height={props.ys.length * 40 + 60}>
    {(width) => {
      const left = 64;
      const [wide, tall] = [Math.min(110, (width - left - 4) / props.xs.length), 40];
      const times = props.cells.flatMap((cell) => cell.step_s ?? []);
      const [low, high] = [Math.min(...times), Math.max(...times)];
      const weak = (s: number): number => (high > low ? Math.log(s / low) / Math.log(high / low) : 0);
      const below = props.ys.length * tall;
      return (
        <>
          {props.cells.map((cell) => {
            const [x, y] = [left + props.xs.indexOf(cell.x) * wide, (props.ys.length - 1 - props.ys.indexOf(cell.y)) * tall];
            const far = cell.step_s === null ? 1 : weak(cell.step_s);
            return (
              <g key={`${cell.x}/${cell.y}`} class="cell" onClick={cell.pick}>
                <title>{cell.title}</title>
                <rect class={cell.step_s === null ? "fill idle" : "heat"} x={x + 1} y={y + 1} width={wide - 2} height={tall - 2} rx="4"
                  {...(cell.step_s === null ? {} : { opacity: 1 - 0.85 * far })} />
                {cell.step_s === low && <rect class="best" x={x + 2} y={y + 2} width={wide - 4} height={tall - 4} rx="3" />}
                {wide > 40 && <text class={cell.step_s !== null && far < 0.25 ? "on" : "weak"} x={x + wide / 2} y={y + 24} text-anchor="middle">
                  {cell.step_s === null ? "–" : seconds(cell.step_s)}</text>}
              </g>
            );
          })}
          {props.ys.map((n, i) => <text key={n} class="small" x={left - 8} y={(props.ys.length - 1 - i) * tall + 24} text-anchor="end">{props.names[1]} {n}</text>)}
          {props.xs.map((n, i) => <text key={n} class="small" x={left + (i + 0.5) * wide} y={below + 18} text-anchor="middle">{n}</text>)}
          <text class="axis" x={left + (props.xs.length * wide) / 2} y={below + 42} text-anchor="middle">{props.names[0]}</text>
        </>
      );
    }}
  </Figure>
);

/** Canvas that is drawn again when its size, its data or the colours of the page change. */
export const useCanvas = (draw: (context: CanvasRenderingContext2D, width: number, height: number) => void, height: number) => {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [ref, width] = useWidth();
  useEffect(() => {
    const paint = (): void => {
      const element = canvas.current;
      const context = element?.getContext("2d");
      if (!element || !context) return;
      const ratio = window.devicePixelRatio || 1;
      element.width = Math.round(width * ratio);
      element.height = Math.round(height * ratio);
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, height);
      draw(context, width, height);
    };
    paint();
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", paint);
    return () => dark.removeEventListener("change", paint);
  }, [draw, width, height]);
  return { canvas, ref, width };
};
