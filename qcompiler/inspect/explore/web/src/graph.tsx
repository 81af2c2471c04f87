// The program as a graph of its launches.  An edge is a buffer: from the step that wrote it last to one that reads it.

import { graphlib, layout } from "@dagrejs/dagre";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { colourOf, heat } from "./colours";
import { blockOf, bytesText, type Db, dbRank, dbText, type Entry, firstDb, layersOf, originText, sizesText, type Step, timeText } from "./model";
import { useApp } from "./state";
import { Legend } from "./tables";

/** More boxes than this are drawn folded by module: a layout of more takes seconds. */
const MOST = 400;
/** Ratios in dB above this are all pale while another is below it: an error of a thousandth hides in one of a tenth. */
const SMALL_ERROR = 60;
/** The most characters of a box's name. */
const LABEL = 44;

interface Box { id: string; steps: Step[]; label: string; block: string; folded: boolean }
interface Placed { boxes: (Box & { x: number; y: number; width: number; height: number })[]; edges: { points: { x: number; y: number }[]; key: string }[]; width: number; height: number }

function boxesOf(entry: Entry, open: ReadonlySet<string>): Box[] {
  const boxes: Box[] = [];
  const works = entry.steps.filter((step) => step.kind !== "record" && step.kind !== "wait");
  for (const step of works) {
    const block = blockOf(step.place);
    const last = boxes.at(-1);
    if (block !== "" && !open.has(block) && last?.block === block && last.folded) { last.steps.push(step); continue; }
    const folded = block !== "" && !open.has(block);
    boxes.push({ id: String(step.number), steps: [step], block, folded, label: folded ? block : labelOf(step) });
  }
  for (const box of boxes) if (box.steps.length === 1) box.label = labelOf(box.steps[0]!);
  return boxes;
}

const labelOf = (step: Step) => (step.place ? `${step.place.split(".").slice(-2).join(".")} · ${step.template || step.kind}` : step.kernel || step.kind);

/** The second line of a box. */
function figures(box: Box): string {
  const time = timeText(box.steps.reduce((sum, step) => sum + (step.alone ?? 0), 0));
  const bytes = bytesText(box.steps.reduce((sum, step) => sum + step.nbytes, 0));
  return `${box.steps.length > 1 ? `▸ ${box.steps.length} steps, ` : ""}${time}, ${bytes}`;
}

function place(entry: Entry, boxes: Box[]): Placed {
  const graph = new graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 28, marginx: 10, marginy: 10 });
  graph.setDefaultEdgeLabel(() => ({}));
  const boxOf = new Map<number, string>();
  for (const box of boxes) {
    graph.setNode(box.id, { width: Math.max(6.9 * Math.min(box.label.length, LABEL), 6.2 * figures(box).length, 130) + 18, height: 36 });
    box.steps.forEach((step) => boxOf.set(step.number, box.id));
  }
  const writer = new Map<string, string>();
  for (const step of entry.steps) {
    const own = boxOf.get(step.number);
    if (own === undefined) continue;
    for (const buffer of step.reads) {
      const from = writer.get(buffer);
      if (from !== undefined && from !== own && !graph.hasEdge(from, own)) graph.setEdge(from, own);
    }
    step.writes.forEach((buffer) => writer.set(buffer, own));
  }
  layout(graph);
  const size = graph.graph();
  return {
    boxes: boxes.map((box) => { const at = graph.node(box.id); return { ...box, x: at.x!, y: at.y!, width: at.width!, height: at.height! }; }),
    edges: graph.edges().map((edge) => ({ points: graph.edge(edge).points!, key: `${edge.v} ${edge.w}` })),
    width: size.width ?? 100, height: size.height ?? 100,
  };
}

const COLOURS = ["time", "bytes", "format", "error"] as const;

export function EntryChoice() {
  const { model, state, set } = useApp();
  return (
    <label>entry point <select value={state.entry} onChange={(event) => set({ entry: event.currentTarget.value })}>
      {model.entries.map((entry) => <option key={entry.name}>{entry.name}</option>)}
    </select></label>
  );
}

export function Graph() {
  const app = useApp();
  const entry = app.model.entries.find((each) => each.name === app.state.entry) ?? app.model.entries[0];
  const [by, setBy] = useState<(typeof COLOURS)[number]>("time");
  const [query, setQuery] = useState("");
  const blocks = useMemo(() => new Set(entry?.steps.map((step) => blockOf(step.place)) ?? []), [entry]);
  const [open, setOpen] = useState<ReadonlySet<string>>(new Set());
  const works = entry?.steps.length ?? 0;
  useEffect(() => setOpen(works <= 40 ? blocks : new Set()), [entry]);
  const placed = useMemo(() => {
    if (!entry) return null;
    const boxes = boxesOf(entry, open);
    return boxes.length > MOST ? null : place(entry, boxes);
  }, [entry, open]);
  if (!entry) return <p class="empty">The plan has no entry point.</p>;
  const amount = (box: Box) => box.steps.reduce((sum, step) => sum + (by === "bytes" ? step.nbytes : (step.alone ?? 0)), 0);
  const most = placed ? Math.max(1e-9, ...placed.boxes.map(amount)) : 1;
  /** The worst ratio of a box's steps; null if none of them wrote a value of the model. */
  const errorOf = (box: Box): Db => box.steps.flatMap((step) => layersOf(app.model, entry.name, step.number).map(firstDb))
    .reduce<Db>((worst, each) => (dbRank(each) < dbRank(worst) ? each : worst), null);
  const errors = by === "error" && placed ? placed.boxes.map((box) => dbRank(errorOf(box))).filter((rank) => Math.abs(rank) < 1e6) : [];
  const [low, high] = [Math.min(...errors), Math.max(...errors)];
  const pale = low < SMALL_ERROR ? Math.min(high, SMALL_ERROR) : high;
  const fillOf = (box: Box) => {
    if (by === "format") return "var(--raised)";
    if (by !== "error") return heat(amount(box) / most);
    const rank = dbRank(errorOf(box));
    return rank >= 1e6 ? "var(--raised)" : heat(rank <= low ? 1 : Math.max(0, (pale - rank) / Math.max(pale - low, 1e-9)) ** 2);
  };
  const formatOf = (box: Box) => box.steps.flatMap((step) => step.formats)[0] ?? "no packed weight";
  const matches = (box: Box) => query !== "" && [box.label, ...box.steps.flatMap((step) => [step.place, step.kernel])].some((each) => each.toLowerCase().includes(query.toLowerCase()));
  const pick = (box: Box) => {
    if (box.steps.length > 1) { setOpen(new Set([...open, box.block])); return; }
    app.set({ selection: { kind: "step", entry: entry.name, number: box.steps[0]!.number } });
  };
  const found = placed ? placed.boxes.filter(matches).length : 0;
  return (
    <div class="fill">
      <div class="tools">
        <EntryChoice />
        <label>colour <select value={by} onChange={(event) => setBy(event.currentTarget.value as typeof by)}>{COLOURS.map((each) => <option key={each}>{each}</option>)}</select></label>
        <button onClick={() => setOpen(new Set())}>fold modules</button>
        <button onClick={() => setOpen(blocks)}>unfold all</button>
        <input type="search" placeholder="find in the graph" aria-label="find in the graph" value={query} onInput={(event) => setQuery(event.currentTarget.value)} />
        {query && <span class="dim">{found} found</span>}
        <span class="dim">times {sizesText(entry) && `at ${sizesText(entry)} `}{originText(entry)}</span>
        {by === "error" && <span class="dim">{app.model.errors === null ? "this page has no measured errors: see About" : `${app.model.errors.layers.some((row) => row.model !== null) ? "program against the float model" : "program against the oracle"}${errors.length ? `, ${low.toFixed(1)} to ${high.toFixed(1)} dB; strong: the worst` : ""}; no colour: exact, or no value of the model`}</span>}
        {by === "format" && placed && <Legend names={[...new Set(placed.boxes.map(formatOf))]} />}
      </div>
      {placed === null
        ? <p class="empty">More than {MOST} boxes, too many to lay out. Fold the modules; the timeline has every launch.</p>
        : <Zoomed width={placed.width} height={placed.height} label={`graph of ${entry.name}`}>
          {placed.edges.map((edge) => <path key={edge.key} class="edge" d={`M${edge.points.map((point) => `${point.x.toFixed(1)} ${point.y.toFixed(1)}`).join("L")}`} />)}
          {placed.boxes.map((box) => (
            <g key={box.id} class={`box${matches(box) ? " found" : ""}${query && !matches(box) ? " faint" : ""}`} tabindex={0} role="button"
              aria-label={box.label} transform={`translate(${box.x - box.width / 2} ${box.y - box.height / 2})`}
              onClick={() => pick(box)} onKeyDown={(event) => { if (event.key === "Enter") pick(box); }}>
              <rect width={box.width} height={box.height} rx="4" fill={fillOf(box)} stroke={by === "format" ? colourOf(formatOf(box)) : "var(--line)"} stroke-width={by === "format" ? 2.5 : 1} />
              <text x="8" y="15">{box.label.length > LABEL ? `${box.label.slice(0, LABEL - 1)}…` : box.label}</text>
              <text x="8" y="29" class="small">{by === "error" ? dbText(errorOf(box)) || "no value of the model" : figures(box)}</text>
              <title>{box.steps.map((step) => `${step.number} ${step.kernel || step.kind} ${step.place}`).slice(0, 12).join("\n")}</title>
            </g>
          ))}
        </Zoomed>}
    </div>
  );
}

/** A drawing that is moved by dragging and by the arrow keys, and zoomed by the wheel and by + and -. */
function Zoomed(props: { width: number; height: number; label: string; children: preact.ComponentChildren }) {
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ x: 0, y: 0, scale: 1 });
  useEffect(() => {
    const room = box.current;
    if (room) setView({ x: Math.max(0, (room.clientWidth - props.width) / 2), y: 0, scale: 1 });
  }, [props.width, props.height]);
  const zoom = (factor: number, x: number, y: number) => setView((old) => {
    const scale = Math.max(0.05, Math.min(4, old.scale * factor));
    return { scale, x: x - ((x - old.x) * scale) / old.scale, y: y - ((y - old.y) * scale) / old.scale };
  });
  useEffect(() => {
    const room = box.current;
    const onWheel = (event: WheelEvent) => {
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) { zoom(Math.exp(-event.deltaY / 200), event.offsetX, event.offsetY); return; }
      setView((old) => ({ ...old, x: old.x - event.deltaX, y: old.y - event.deltaY }));
    };
    room?.addEventListener("wheel", onWheel, { passive: false });
    return () => room?.removeEventListener("wheel", onWheel);
  }, []);
  const onPointerDown = (event: PointerEvent) => {
    if ((event.target as Element).closest(".box")) return;
    const start = { x: event.clientX - view.x, y: event.clientY - view.y };
    const room = box.current!;
    room.setPointerCapture(event.pointerId);
    const move = (each: PointerEvent) => setView((old) => ({ ...old, x: each.clientX - start.x, y: each.clientY - start.y }));
    const stop = () => { room.removeEventListener("pointermove", move); };
    room.addEventListener("pointermove", move);
    room.addEventListener("pointerup", stop, { once: true });
  };
  const middle = () => [(box.current?.clientWidth ?? 0) / 2, (box.current?.clientHeight ?? 0) / 2] as const;
  const fit = () => {
    const room = box.current;
    if (!room) return;
    const scale = Math.min(1, room.clientWidth / props.width, room.clientHeight / props.height);
    setView({ scale, x: (room.clientWidth - props.width * scale) / 2, y: 0 });
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const keys: Record<string, () => void> = {
      "+": () => zoom(1.25, ...middle()), "=": () => zoom(1.25, ...middle()), "-": () => zoom(0.8, ...middle()), "0": fit,
      ArrowUp: () => setView((old) => ({ ...old, y: old.y + 60 })), ArrowDown: () => setView((old) => ({ ...old, y: old.y - 60 })),
      ArrowLeft: () => setView((old) => ({ ...old, x: old.x + 60 })), ArrowRight: () => setView((old) => ({ ...old, x: old.x - 60 })),
    };
    const act = keys[event.key];
    if (act) { act(); event.preventDefault(); event.stopPropagation(); }
  };
  return (
    <div class="drawing" ref={box} tabIndex={0} role="group" aria-label={`${props.label}; arrows move it, + and - zoom`} onPointerDown={onPointerDown} onKeyDown={onKeyDown}>
      <svg width="100%" height="100%"><g transform={`translate(${view.x} ${view.y}) scale(${view.scale})`}>{props.children}</g></svg>
      <div class="zoom">
        <button aria-label="zoom in" onClick={() => zoom(1.25, ...middle())}>+</button>
        <button aria-label="zoom out" onClick={() => zoom(0.8, ...middle())}>−</button>
        <button onClick={fit}>fit</button>
      </div>
    </div>
  );
}
