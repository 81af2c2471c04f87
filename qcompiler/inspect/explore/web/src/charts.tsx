// The memory plan as lifetimes over offsets, and the timeline of the streams of each device.

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { colourOf } from "./colours";
import { EntryChoice } from "./graph";
import { type Arena, bytesText, type Entry, originText, sizesText, type Step, timeText } from "./model";
import { useApp } from "./state";
import { Legend } from "./tables";

export function Memory() {
  const { model } = useApp();
  const planned = model.arenas.filter((arena) => arena.kind === "activations" && arena.nbytes > 0);
  const others = model.arenas.filter((arena) => !planned.includes(arena));
  return (
    <div class="page">
      {planned.map((arena) => <Lifetimes key={arena.name} arena={arena} entry={model.entries.find((each) => each.name === arena.entry)} />)}
      <h2>Arenas</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="arenas"><table>
        <thead><tr><th>arena</th><th>kind</th><th>device</th><th class="right">buffers</th><th class="right">bytes</th></tr></thead>
        <tbody>{[...planned, ...others].map((arena) => (
          <tr key={arena.name}><td>{arena.name}</td><td>{arena.kind}</td><td>{arena.device}</td><td class="right">{arena.buffers.length}</td><td class="right">{bytesText(arena.nbytes)}</td></tr>
        ))}</tbody>
      </table></div>
    </div>
  );
}

function Lifetimes(props: { arena: Arena; entry: Entry | undefined }) {
  const { arena, entry } = props;
  const app = useApp();
  const [width, height] = [1200, 260];
  const steps = Math.max(1, entry?.steps.length ?? 1);
  const sum = arena.buffers.reduce((total, buffer) => total + buffer.nbytes, 0);
  const writer = (name: string) => entry?.steps.find((step) => step.writes.includes(name));
  return (
    <section>
      <h2>{arena.name} <span class="dim">{bytesText(arena.nbytes)} for {arena.buffers.length} buffers, {bytesText(sum)} without sharing</span></h2>
      <div class="chart">
        <span class="axis">{bytesText(arena.nbytes)}</span>
        <svg viewBox={`0 0 ${width} ${height}`} preserveAspectRatio="none" role="group" aria-label={`lifetimes of the buffers of ${arena.name}: steps to the right, offsets upwards`}>
          {arena.buffers.filter((buffer) => buffer.first >= 0).map((buffer) => {
            const step = writer(buffer.name);
            const open = () => step && app.set({ selection: { kind: "step", entry: arena.entry, number: step.number } });
            return (
              <rect key={buffer.name} class="life" tabindex={0} role="button" aria-label={`${buffer.name}, ${bytesText(buffer.nbytes)}, steps ${buffer.first} to ${buffer.last}`} x={(buffer.first / steps) * width} width={((buffer.last - buffer.first + 1) / steps) * width}
                y={height - ((buffer.offset + buffer.nbytes) / arena.nbytes) * height} height={(buffer.nbytes / arena.nbytes) * height}
                fill={colourOf(step?.template || "other")} onClick={open} onKeyDown={(event) => { if (event.key === "Enter") open(); }}>
                <title>{`${buffer.name}: ${bytesText(buffer.nbytes)} at ${buffer.offset}, steps ${buffer.first} to ${buffer.last}${step ? `\nwritten by ${step.kernel || step.kind} ${step.place}` : ""}`}</title>
              </rect>
            );
          })}
        </svg>
        <span class="axis">step 0</span><span class="axis end">step {steps - 1} of {arena.entry}</span>
      </div>
      <Legend names={kindsOf(arena.buffers.filter((buffer) => buffer.first >= 0).map((buffer) => writer(buffer.name)?.template || "other"))} />
    </section>
  );
}

/** Each once, in the order in which they come first. */
const kindsOf = (names: string[]) => [...new Set(names)];

const LANE = 34;

export function Timeline() {
  const app = useApp();
  const entry = app.model.entries.find((each) => each.name === app.state.entry) ?? app.model.entries[0];
  const [scale, setScale] = useState(1);
  if (!entry) return <p class="empty">The plan has no entry point.</p>;
  const devices = [...new Set(Object.values(entry.streams))];
  const works = entry.steps.filter((step) => step.begin !== null);
  const sizes = sizesText(entry);
  return (
    <div class="page">
      <div class="tools">
        <EntryChoice />
        <label>zoom <input type="range" min="1" max="40" step="0.5" value={scale} aria-label="zoom of the timeline" onInput={(event) => setScale(Number(event.currentTarget.value))} /></label>
      </div>
      <p><b>{timeText(entry.span)}</b> {sizes && `at ${sizes}, `}{originText(entry)}; one after the other {timeText(entry.serial)}{Object.keys(entry.streams).length > 1 && "; outlined: the critical path"}</p>
      <p><Legend names={kindsOf(works.map((step) => step.template || step.kind))} /></p>
      {devices.map((device) => <Lanes key={device} device={device} entry={entry} works={works} scale={scale} />)}
    </div>
  );
}

function Lanes(props: { device: string; entry: Entry; works: Step[]; scale: number }) {
  const { entry, works, scale } = props;
  const app = useApp();
  const streams = Object.keys(entry.streams).filter((stream) => entry.streams[stream] === props.device);
  const [room, setRoom] = useState(1100);
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const element = box.current;
    if (element === null) return undefined;
    const observer = new ResizeObserver(() => setRoom(Math.max(200, element.clientWidth)));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  const width = room * scale;
  const x = (us: number) => (us / Math.max(entry.span, 1e-9)) * width;
  const row = new Map(streams.map((stream, i) => [stream, i]));
  const at = new Map(works.map((step) => [step.number, step]));
  return (
    <section>
      <h2>{props.device}</h2>
      <div class="lanes">
        <div class="names">{streams.map((stream) => <span key={stream} style={{ height: `${LANE}px` }}>{stream}</span>)}</div>
        <div class="scroll plain" tabIndex={0} role="region" ref={box} aria-label={`timeline of ${props.device}`}>
          <svg class="times" width={width} height={LANE * streams.length + 16}>
            {[0, 0.25, 0.5, 0.75, 1].map((share) => <text key={share} class="small" x={share * width} text-anchor={share === 0 ? "start" : share === 1 ? "end" : "middle"} y={LANE * streams.length + 12}>{timeText(entry.span * share)}</text>)}
            {works.filter((step) => row.has(step.stream)).map((step) => {
              const [left, right] = [x(step.begin!), x(step.end!)];
              const label = step.place.split(".").at(-1) || step.template;
              return (
                <g key={step.number} class="slice" tabindex={0} role="button" aria-label={`${step.kernel || step.kind} ${step.place} ${timeText(step.alone)}`}
                  onClick={() => app.set({ selection: { kind: "step", entry: entry.name, number: step.number } })}
                  onKeyDown={(event) => { if (event.key === "Enter") app.set({ selection: { kind: "step", entry: entry.name, number: step.number } }); }}>
                  <rect x={left} y={row.get(step.stream)! * LANE + 3} width={Math.max(1, right - left - 0.5)} height={LANE - 8} fill={colourOf(step.template || step.kind)} class={step.critical && Object.keys(entry.streams).length > 1 ? "critical" : ""} />
                  {right - left > 7 * label.length + 8 && <text x={left + 4} y={row.get(step.stream)! * LANE + 20} class="on-colour">{label}</text>}
                  <title>{`${step.number} ${step.kernel || step.kind}\n${step.place}\n${timeText(step.alone)}, ${bytesText(step.nbytes)}`}</title>
                </g>
              );
            })}
            {entry.edges.map(([event, source, target]) => {
              const [from, to] = [at.get(source), at.get(target)];
              if (!from || !to || !row.has(from.stream) || !row.has(to.stream)) return null;
              return <line key={`${event} ${target}`} class="wait" x1={x(from.end!)} y1={row.get(from.stream)! * LANE + LANE / 2} x2={x(to.begin!)} y2={row.get(to.stream)! * LANE + LANE / 2}><title>{`waits for ${event}`}</title></line>;
            })}
          </svg>
        </div>
      </div>
    </section>
  );
}
