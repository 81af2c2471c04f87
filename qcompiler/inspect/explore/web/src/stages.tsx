// The list of stages, and up to four of them side by side and in step.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { CodeView } from "./code";
import { beside, diff, type Difference } from "./diff";
import type { Code } from "./ir";
import { count, type Stage } from "./model";
import { codeOf, useApp } from "./state";

const MOST = 4;

export function Stages() {
  const { model, state, set } = useApp();
  if (model.stages.length === 0) return <p class="empty">This file was saved without the texts of the stages: <code>qc compile</code> without <code>--no-stages</code> and <code>lm.save(path, stages=True)</code> put them in. Kernels, ledger and the plan are on the other pages.</p>;
  return (
    <div class="stages">
      <StageList />
      <div class="columns" style={{ "--columns": state.columns.length }}>
        <Columns />
      </div>
      <div class="add">
        <button disabled={state.columns.length >= MOST} onClick={() => set({ columns: [...state.columns, Math.min(model.stages.length - 1, state.columns.at(-1)! + 1)], column: state.columns.length })}>
          + stage beside
        </button>
      </div>
    </div>
  );
}

function StageList() {
  const { model, state, set } = useApp();
  const current = state.columns[state.column];
  const list = useRef<HTMLElement>(null);
  useEffect(() => list.current?.querySelector(".on")?.scrollIntoView({ block: "nearest" }), [current]);
  const choose = (position: number) => set({ columns: state.columns.map((each, i) => (i === state.column ? position : each)), target: null });
  return (
      <nav class="list" aria-label="stages" ref={list}>
        {model.stages.map((stage, position) => (
          <button key={position} class={`stage${stage.changed ? "" : " same"}${position === current ? " on" : ""}`} aria-current={position === current}
            onClick={() => choose(position)}>
            <span class="stage-name"><span class="dim">{String(stage.index).padStart(2, "0")}</span> {stage.name}</span>
            <span class="dim">{stage.seconds === null ? "" : `${stage.seconds.toFixed(3)} s`}</span>
            <span class="stage-what">{summary(stage)}</span>
          </button>
        ))}
      </nav>
  );
}

function summary(stage: Stage): string {
  if (!stage.changed) return "no change";
  if (stage.kind === "source") return `${count(stage.lines)} lines`;
  const total = Object.values(stage.ops).reduce((sum, each) => sum + each, 0);
  const deltas = Object.entries(stage.delta).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
  const text = deltas.slice(0, 2).map(([name, each]) => `${each > 0 ? "+" : "−"}${Math.abs(each)} ${name.replace("torch.ops.", "")}`).join(", ");
  return `${count(total)} ops${text ? `; ${text}${deltas.length > 2 ? " …" : ""}` : ""}`;
}

function Columns() {
  const { model, state, set } = useApp();
  const codes = useCodes(state.columns.map((position) => model.stages[position]!));
  const between = useMemo(
    () => codes.slice(1).map((code, i) => {
      const left = codes[i];
      return left && code ? diff(left.lines.map((line) => line.key), code.lines.map((line) => line.key)) : null;
    }),
    [codes],
  );
  const [place, setPlace] = useState({ column: 0, line: -1, part: 0 });
  const selection = state.selection?.kind === "value" ? state.selection : null;
  return (
    <>
      {state.columns.map((position, column) => {
        const stage = model.stages[position]!;
        const code = codes[column];
        const chosen = selection && code ? selectedIn(codes, state.columns, selection, column, between) : -1;
        return (
          <section key={column} class={`column${column === state.column ? " active" : ""}`} aria-label={stage.name} onFocusCapture={() => column !== state.column && set({ column })}>
            <header>
              <select aria-label={`stage of column ${column + 1}`} value={position} onChange={(event) => set({ columns: state.columns.map((each, i) => (i === column ? Number(event.currentTarget.value) : each)), column })}>
                {model.stages.map((each, i) => <option key={i} value={i}>{each.index} {each.name}</option>)}
              </select>
              <span class="dim">{count(stage.lines)} lines</span>
              {column > 0 && between[column - 1] && <Changes difference={between[column - 1]!} />}
              {state.columns.length > 1 && <button aria-label={`close ${stage.name}`} onClick={() => set({ columns: state.columns.filter((_, i) => i !== column), column: 0 })}>×</button>}
            </header>
            {code ? (
              <CodeView code={code} label={`text-${column}`} selected={chosen} name={selection?.stage === position ? selection.name : ""}
                target={state.target?.stage === position ? state.target : null}
                follow={place.column === column || place.line < 0 ? -1 : lineIn(between, place, column)} part={place.part}
                marks={(line) => mark(between, column, line)}
                onPick={(line, name) => set({ selection: { kind: "value", stage: position, line, name }, column, target: null })}
                onTop={(line, part) => state.columns.length > 1 && setPlace({ column, line, part })} />
            ) : <p class="empty">unpacking…</p>}
          </section>
        );
      })}
    </>
  );
}

function useCodes(stages: Stage[]): (Code | undefined)[] {
  const key = stages.map((stage) => stage.text).join(" ");
  const [found, setFound] = useState<{ key: string; codes: Code[] }>({ key: "", codes: [] });
  useEffect(() => {
    let live = true;
    void Promise.all(stages.map((stage) => codeOf(stage.text, stage.kind))).then((codes) => live && setFound({ key, codes }));
    return () => { live = false; };
  }, [key]);
  return useMemo(() => (found.key === key ? found.codes : stages.map(() => undefined)), [found, key]);
}

function Changes(props: { difference: Difference }) {
  const { right, left, movedLeft } = props.difference;
  const moved = movedLeft.size;
  const [removed, added] = [right, left].map((pairs) => pairs.reduce((sum, each) => sum + (each < 0 ? 1 : 0), 0) - moved);
  return <span class="changes"><b class="plus">+{added}</b> <b class="minus">−{removed}</b> <b class="move">{moved} moved</b></span>;
}

/** How a line differs from the column to its left, and else from the one to its right. */
function mark(between: (Difference | null)[], column: number, line: number): string {
  const before = between[column - 1];
  if (before && before.left[line] === -1) return before.movedRight.has(line) ? "moved" : "added";
  const behind = between[column];
  if (behind && behind.right[line] === -1) return behind.movedLeft.has(line) ? "moved" : "removed";
  return "";
}

/** The line of `column` that stands beside a line of another one. */
function lineIn(between: (Difference | null)[], place: { column: number; line: number }, column: number): number {
  let { line } = place;
  for (let at = place.column; at < column; at += 1) {
    const step = between[at];
    if (!step) return -1;
    line = beside(step.right, step.movedLeft, line);
  }
  for (let at = place.column; at > column; at -= 1) {
    const step = between[at - 1];
    if (!step) return -1;
    line = beside(step.left, step.movedRight, line);
  }
  return line;
}

/** The selected op in each column: the same line, its equal or moved one, else the op of that module path. */
function selectedIn(
  codes: (Code | undefined)[], columns: number[], selection: { stage: number; line: number }, column: number,
  between: (Difference | null)[],
): number {
  if (columns[column] === selection.stage) return selection.line;
  const from = columns.indexOf(selection.stage);
  const [own, other] = [codes[from], codes[column]];
  if (!own || !other) return -1;
  const record = own.lines[selection.line];
  if (record === undefined || record.op === "") return -1;
  const there = lineIn(between, { column: from, line: selection.line }, column);
  if (other.lines[there]?.key === record.key) return there;
  return (other.byPath.get(record.path) ?? []).find((line) => other.lines[line]!.op === record.op) ?? -1;
}
