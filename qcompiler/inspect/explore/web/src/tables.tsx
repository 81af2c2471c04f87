// The pages that are tables: ledger with its treemap, kernels, decisions, and what the page holds.

import { hierarchy, treemap } from "d3-hierarchy";
import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";
import { colourOf } from "./colours";
import { bytesText, count, type Decision, type LedgerLine, originText, sizesText, timeText } from "./model";
import { useApp } from "./state";

interface Column<T> { name: string; value: (row: T) => string | number; show?: (row: T) => ComponentChildren; numeric?: boolean; oneLine?: boolean }

export function Table<T>(props: { rows: T[]; columns: Column<T>[]; label: string; open?: (row: T) => void; sorted?: number }) {
  const [sort, setSort] = useState({ column: props.sorted ?? -1, down: props.sorted !== undefined });
  const rows = useMemo(() => {
    const column = props.columns[sort.column];
    if (column === undefined) return props.rows;
    const sign = sort.down ? -1 : 1;
    return [...props.rows].sort((a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
    });
  }, [props.rows, sort]);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={props.label}>
      <table>
        <thead><tr>{props.columns.map((column, i) => (
          <th key={column.name} class={column.numeric ? "right" : ""} aria-sort={sort.column === i ? (sort.down ? "descending" : "ascending") : "none"}>
            <button onClick={() => setSort({ column: i, down: sort.column === i ? !sort.down : column.numeric === true })}>{column.name} {sort.column === i ? (sort.down ? "▾" : "▴") : ""}</button>
          </th>
        ))}</tr></thead>
        <tbody>{rows.map((row, i) => (
          <tr key={i}>{props.columns.map((column, j) => (
            <td key={column.name} class={column.numeric ? "right" : column.oneLine ? "one-line" : ""}>
              {j === 0 && props.open ? <button class="link" onClick={() => props.open!(row)}>{column.show ? column.show(row) : column.value(row)}</button>
                : column.show ? column.show(row) : column.value(row)}
            </td>
          ))}</tr>
        ))}</tbody>
      </table>
    </div>
  );
}

const stored = (row: LedgerLine) => (row.bytesAfter ? row.format || row.dtype : "dropped");

export function Ledger() {
  const app = useApp();
  const { ledger, totals } = app.model;
  if (ledger.length === 0) return <p class="empty">This program has no ledger.</p>;
  const promise = totals["promise_bits"];
  return (
    <div class="page">
      <p>recipe <b>{String(totals["recipe"])}</b>: {count(ledger.length)} tensors, {bytesText(Number(totals["bytes_before"]))} → <b>{bytesText(Number(totals["bytes_after"]))}</b>, {Number(totals["bits_per_weight"]).toFixed(3)} bits per weight ({promise === null || promise === undefined ? "no promise" : `promised ${promise}`})</p>
      <Treemap rows={ledger} open={(row) => app.set({ selection: { kind: "path", path: row.parameters[0] ?? "" } })} />
      <Table label="ledger" rows={ledger} open={(row) => app.set({ selection: { kind: "path", path: row.parameters[0] ?? "" } })} columns={[
        { name: "parameter", value: (row) => row.parameters.join(", ") },
        { name: "shape", value: (row) => row.shape.reduce((a, b) => a * b, 1), show: (row) => row.shape.join("×") || "scalar" },
        { name: "dtype", value: (row) => row.dtype },
        { name: "stored as", value: stored },
        { name: "bits", value: (row) => row.bits, show: (row) => row.bits.toFixed(3), numeric: true },
        { name: "bytes before", value: (row) => row.bytesBefore, show: (row) => count(row.bytesBefore), numeric: true },
        { name: "bytes after", value: (row) => row.bytesAfter, show: (row) => count(row.bytesAfter), numeric: true },
        { name: "padding", value: (row) => row.padding, show: (row) => count(row.padding), numeric: true },
        { name: "why", value: (row) => row.reason },
      ]} />
    </div>
  );
}

interface Node { name: string; row?: LedgerLine; children?: Node[] }

function Treemap(props: { rows: LedgerLine[]; open: (row: LedgerLine) => void }) {
  const [width, height] = [1200, 260];
  const leaves = useMemo(() => {
    const root: Node = { name: "", children: [] };
    for (const row of props.rows) {
      if (row.bytesAfter === 0) continue;
      let at = root;
      const parts = (row.parameters[0] ?? "").split(".");
      parts.forEach((part, i) => {
        let next = at.children!.find((each) => each.name === part && each.children !== undefined);
        if (i === parts.length - 1) at.children!.push({ name: part, row });
        else { if (!next) at.children!.push((next = { name: part, children: [] })); at = next; }
      });
    }
    const tree = hierarchy<Node>(root).sum((node) => node.row?.bytesAfter ?? 0).sort((a, b) => (b.value ?? 0) - (a.value ?? 0));
    return treemap<Node>().size([width, height]).paddingInner(1)(tree).leaves().filter((leaf) => leaf.data.row !== undefined);
  }, [props.rows]);
  const formats = [...new Set(props.rows.filter((row) => row.bytesAfter > 0).map(stored))];
  return (
    <figure>
      <svg class="treemap" viewBox={`0 0 ${width} ${height}`} preserveAspectRatio="none" role="img" aria-label="bytes of parameters as areas; the table below has the same">
        {leaves.map((leaf) => {
          const row = leaf.data.row!;
          return (
            <rect key={row.parameters[0]} x={leaf.x0} y={leaf.y0} width={leaf.x1 - leaf.x0} height={leaf.y1 - leaf.y0} fill={colourOf(stored(row))} onClick={() => props.open(row)}>
              <title>{`${row.parameters[0]}\n${stored(row)}, ${bytesText(row.bytesAfter)}`}</title>
            </rect>
          );
        })}
      </svg>
      <figcaption><Legend names={formats} /></figcaption>
    </figure>
  );
}

export function Legend(props: { names: string[] }) {
  return <span class="legend">{props.names.map((name) => <span key={name}><svg width="10" height="10" aria-hidden="true"><rect width="10" height="10" fill={colourOf(name)} /></svg> {name}</span>)}</span>;
}

/** Of a kernel that a select has for other sizes: no time is not a time of zero. */
const NOT_RUN = <span class="dim">other sizes</span>;

export function Kernels() {
  const app = useApp();
  const { model } = app;
  const rows = useMemo(() => {
    const steps = model.entries.flatMap((entry) => entry.steps);
    return model.kernels.map((kernel) => {
      const own = steps.filter((step) => step.kernels.includes(kernel.name));
      const run = own.filter((step) => step.kernel === kernel.name);
      return { kernel, launches: own.length, runs: run.length > 0, time: run.reduce((sum, step) => sum + (step.alone ?? 0), 0), bytes: run.reduce((sum, step) => sum + step.nbytes, 0) };
    });
  }, [model]);
  const choices = model.decisions.filter((each) => each.sort === "kernel");
  const engine: Column<(typeof rows)[number]>[] = model.facts.kind === "cpu" ? [] : [{ name: "engine", value: (row) => row.kernel.engine }];
  return (
    <div class="page">
      <p class="dim">Times and bytes are sums over the launches of each kernel in all entry points; a kernel that runs at other sizes only has none. Times: {model.entries.filter((entry) => entry.steps.some((step) => step.begin !== null)).map((entry) => `${entry.name}${sizesText(entry) && ` at ${sizesText(entry)}`} ${originText(entry)}`).join("; ")}.</p>
      <Table label="kernels" sorted={3 + engine.length} rows={rows} open={(row) => app.set({ selection: { kind: "kernel", name: row.kernel.name } })} columns={[
        { name: "kernel", value: (row) => row.kernel.name },
        { name: "template", value: (row) => row.kernel.template },
        ...engine,
        { name: "launches", value: (row) => row.launches, numeric: true },
        { name: "time", value: (row) => row.time, show: (row) => (row.runs ? timeText(row.time) : NOT_RUN), numeric: true },
        { name: "bytes", value: (row) => row.bytes, show: (row) => (row.runs ? bytesText(row.bytes) : NOT_RUN), numeric: true },
        { name: "first for", value: (row) => row.kernel.serves },
        { name: "launch", value: (row) => row.kernel.launch },
      ]} />
      <h2>Choices, and why other candidates were rejected</h2>
      <Choices rows={choices} empty="The report of this program has no choice of a kernel." />
    </div>
  );
}

function Choices(props: { rows: Decision[]; empty: string }) {
  const app = useApp();
  if (props.rows.length === 0) return <p class="dim">{props.empty}</p>;
  return (
    <Table label="decisions" rows={props.rows} open={(row) => app.set({ selection: { kind: "path", path: row.path } })} columns={[
      { name: "module", value: (row) => row.path, show: (row) => row.path || "(whole program)" },
      { name: "stage", value: (row) => row.stage, oneLine: true },
      { name: "what", value: (row) => row.what },
      { name: "why", value: (row) => row.why },
    ]} />
  );
}

export function Decisions() {
  const { decisions } = useApp().model;
  const of = (sort: Decision["sort"]) => decisions.filter((each) => each.sort === sort);
  return (
    <div class="page">
      <h2>Idioms recognised <span class="dim">{of("idiom").length}</span></h2>
      <Choices rows={of("idiom")} empty="None." />
      <h2>Idioms missed, with the first condition that failed <span class="dim">{of("missed").length}</span></h2>
      <Choices rows={of("missed")} empty="None: no ops looked like an idiom and were left." />
      <h2>Other decisions <span class="dim">{of("other").length}</span></h2>
      <Choices rows={of("other")} empty="None." />
    </div>
  );
}

export function About() {
  const { facts, absent, entries, stages, kernels } = useApp().model;
  return (
    <div class="page prose">
      <h2>{facts.title}</h2>
      <p>{facts.origin === "file" ? `From the file ${facts.source}` : "From a compile"}, qcompiler {facts.qcompiler}, for {facts.kind} ({facts.isa}), devices {facts.devices.join(", ")}. {stages.length} stages, {kernels.length} kernels.</p>
      {entries.map((entry) => (
        <p key={entry.name}><b>{entry.name}</b>({entry.inputs.join(", ")}) → ({entry.outputs.join(", ")}): {entry.steps.length} steps, {timeText(entry.span)}{sizesText(entry) && ` at ${sizesText(entry)}`}, {originText(entry)}{Object.keys(entry.ranges).length > 0 ? `; ${Object.entries(entry.ranges).map(([name, [low, high]]) => `${name} in [${low}, ${high}]`).join(", ")}` : ""}</p>
      ))}
      <h2>What this page does not hold</h2>
      <ul>{absent.map((each) => <li key={each}>{each}</li>)}</ul>
      <p class="dim">This page makes no request: all of its data is in the file.</p>
    </div>
  );
}
