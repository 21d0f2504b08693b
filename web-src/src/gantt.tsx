// Timeline of a simulated step: a row per rank, a block per pass; wheel, drag, buttons and keys move it.
import { useCallback, useState } from "preact/hooks";
import { useCanvas } from "./charts";
import { seconds } from "./format";
import type { Simulated } from "./types";

const KINDS: Record<string, [string, string]> = {
  F: ["forward", "--c1"], B: ["backward", "--c4"], I: ["gradients of inputs", "--c4"], W: ["gradients of weights", "--c6"],
};
const AXIS = 26;
const LABEL = 52;

export const Gantt = ({ found }: { found: Simulated }) => {
  const line = found.timeline;
  const end = line.end_ns.reduce((a, b) => Math.max(a, b), 1);
  // Of many micro-batches the first ones show the pattern; all of them would be a blur.
  const [[from, to], setRange] = useState<[number, number]>([0, end * Math.min(1, Math.max(20, 3 * found.ranks) / found.micro_batches)]);
  const [at, setAt] = useState("");
  const [drag, setDrag] = useState<number | null>(null);
  const row = Math.max(8, Math.min(26, Math.floor(420 / found.ranks)));
  const height = AXIS + row * found.ranks + 4;

  const draw = useCallback((context: CanvasRenderingContext2D, width: number) => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name: string): string => style.getPropertyValue(name).trim();
    const x = (ns: number): number => LABEL + ((ns - from) / (to - from)) * (width - LABEL);
    context.font = `12px ${style.getPropertyValue("--sans")}`;
    context.fillStyle = colour("--soft");
    for (let rank = 0; rank < found.ranks; rank += 1) context.fillRect(LABEL, AXIS + rank * row, width - LABEL, row - 2);
    for (let i = 0; i < line.rank.length; i += 1) {
      const [a, b] = [line.start_ns[i] ?? 0, line.end_ns[i] ?? 0];
      if (b < from || a > to) continue;
      const left = Math.max(LABEL, x(a));
      const wide = Math.max(0.6, Math.min(width, x(b)) - left);
      const y = AXIS + (line.rank[i] ?? 0) * row;
      context.fillStyle = colour(KINDS[line.kind[i] ?? ""]?.[1] ?? "--c9");
      context.fillRect(left, y, wide > 3 ? wide - 0.7 : wide, row - 2);
      if (wide > 22 && row >= 12 && (line.micro_batch[i] ?? -1) >= 0) {
        context.fillStyle = colour("--on");
        context.fillText(String(line.micro_batch[i]), left + 4, y + row / 2 + 3);
      }
    }
    context.fillStyle = colour("--dim");
    const every = Math.ceil(14 / row);
    for (let rank = 0; rank < found.ranks; rank += every) context.fillText(`rank ${rank}`, 0, AXIS + rank * row + row / 2 + 3);
    for (let i = 0; i <= 4; i += 1) {
      const text = seconds((from + ((to - from) * i) / 4) / 1e9);
      context.textAlign = i === 0 ? "left" : i === 4 ? "right" : "center";
      context.fillText(text, LABEL + ((width - LABEL) * i) / 4, 14);
    }
    context.textAlign = "left";
  }, [found, from, to, row]);
  const { canvas, ref, width } = useCanvas(draw, height);

  const zoom = (factor: number, middle = (from + to) / 2): void => {
    const half = Math.max(end * 1e-5, Math.min(end, (to - from) * factor));
    const left = Math.max(0, Math.min(end - half, middle - ((middle - from) / (to - from)) * half));
    setRange([left, left + half]);
  };
  const shift = (share: number): void => {
    const by = Math.max(-from, Math.min(end - to, share * (to - from)));
    setRange([from + by, to + by]);
  };
  const time = (event: MouseEvent): number => from + ((event.offsetX - LABEL) / (width - LABEL)) * (to - from);
  const tell = (event: MouseEvent): void => {
    const [rank, ns] = [Math.floor((event.offsetY - AXIS) / row), time(event)];
    const i = line.rank.findIndex((r, n) => r === rank && (line.start_ns[n] ?? 0) <= ns && (line.end_ns[n] ?? 0) >= ns);
    const kind = line.kind[i] ?? "";
    setAt(i < 0 ? "" : `rank ${rank}, stage ${line.stage[i]}: ${KINDS[kind]?.[0] ?? kind.toLowerCase()} of micro-batch ${
      line.micro_batch[i]}, ${seconds(((line.end_ns[i] ?? 0) - (line.start_ns[i] ?? 0)) / 1e9)}`);
  };
  const keys: Record<string, () => void> = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => shift(-0.25), ArrowRight: () => shift(0.25),
    Home: () => setRange([0, end]),
  };
  const says = `${found.schedule}: ${found.ranks} ranks, ${found.micro_batches} micro-batches, pipeline ${seconds(found.pipeline_s)}`;
  return (
    <>
      <div class="row tools">
        <button type="button" onClick={() => zoom(0.5)}>Zoom in</button>
        <button type="button" onClick={() => zoom(2)}>Zoom out</button>
        <button type="button" onClick={() => shift(-0.5)} aria-label="Earlier">←</button>
        <button type="button" onClick={() => shift(0.5)} aria-label="Later">→</button>
        <button type="button" onClick={() => setRange([0, end])}>Whole step</button>
        <ul class="legend">
          {[...new Set(line.kind)].map((kind) => (
            <li key={kind}><i class={`swatch ${{ F: "k1", B: "k4", I: "k4", W: "k6" }[kind] ?? "k9"}`} />{KINDS[kind]?.[0] ?? kind.toLowerCase()}</li>
          ))}
          <li><i class="swatch idle" />waits</li>
        </ul>
      </div>
      <div class="figure" ref={ref}>
        <canvas ref={canvas} class="chart gantt" role="img" aria-label={says} tabIndex={0} style={{ width: "100%", height: `${height}px` }}
          onKeyDown={(event) => { const act = keys[event.key]; if (act) { event.preventDefault(); act(); } }}
          onWheel={(event) => { if (event.ctrlKey || event.metaKey || event.shiftKey) { event.preventDefault(); zoom(event.deltaY > 0 ? 1.3 : 0.77, time(event)); } }}
          onPointerDown={(event) => setDrag(event.offsetX)} onPointerUp={() => setDrag(null)} onPointerLeave={() => { setDrag(null); setAt(""); }}
          onPointerMove={(event) => {
            if (drag !== null) { shift((drag - event.offsetX) / (width - LABEL)); setDrag(event.offsetX); } else tell(event);
          }} />
      </div>
      <p class="note" aria-live="polite">{at || "Drag to move, Ctrl and wheel to zoom; with the keyboard: + − ← → Home."}</p>
    </>
  );
};
