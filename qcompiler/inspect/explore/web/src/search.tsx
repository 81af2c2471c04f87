// Searches every stage: text, or `op:`, `path:`, `shape:`.  Kernels and parameters by name.

import { useEffect, useState } from "preact/hooks";
import type { Line } from "./ir";
import { count } from "./model";
import { codeOf, goTo, pause, useApp } from "./state";

const PER_STAGE = 50;

interface Found { stage: number; total: number; lines: { line: number; text: string }[] }

type Matcher = (line: Line) => boolean;

/** What a query asks of a line: all of `op:`, `path:`, `shape:` and text that it has. */
export function matcher(query: string): Matcher {
  const all = query.trim().split(/(?:^|\s+)(?=(?:op|path|shape):)/).filter((part) => part !== "").flatMap(conditions);
  return (line) => all.every((each) => each(line));
}

/** `op:linear up`: the op, and the text behind it. Sizes may be written with commas, `shape:16, 512`. */
function conditions(part: string): Matcher[] {
  const found = /^(?:(op|path):\s*(\S*)|(shape):\s*((?:[^\s,]+,\s*)*\S*))\s*(.*)$/.exec(part);
  if (!found) return [text(part)];
  const [, named, value, , sizes, rest] = found;
  const own = named !== undefined ? field(named as "op" | "path", value!) : shape(sizes!);
  return rest === "" ? [own] : [own, text(rest!)];
}

function text(words: string): Matcher {
  const wanted = words.toLowerCase();
  return (line) => line.text.toLowerCase().includes(wanted);
}

function field(name: "op" | "path", words: string): Matcher {
  const wanted = words.toLowerCase();
  return (line) => line[name].toLowerCase().includes(wanted);
}

function shape(words: string): Matcher {
  // `1x16x512` in MLIR, `[1, 16, 512]` in torch's graphs and in schedules
  const sizes = words.toLowerCase().split(/[x×,\s]+/).filter((each) => each !== "");
  const forms = [`<${sizes.join("x")}x`, `[${sizes.join(", ")}]`];
  return (line) => sizes.length > 0 && forms.some((form) => line.text.toLowerCase().includes(form));
}

export function Search() {
  const app = useApp();
  const { model, state } = app;
  const [found, setFound] = useState<Found[]>([]);
  const [read, setRead] = useState({ query: "", stages: 0 });
  useEffect(() => {
    let live = true;
    const run = async () => {
      setFound([]);
      setRead({ query: state.query, stages: 0 });
      const matches = matcher(state.query);
      const all: Found[] = [];
      for (const [position, stage] of model.stages.entries()) {
        const code = await codeOf(stage.text, stage.kind);
        if (!live) return;
        const one: Found = { stage: position, total: 0, lines: [] };
        code.lines.forEach((line, number) => {
          if (!matches(line)) return;
          one.total += 1;
          if (one.lines.length < PER_STAGE) one.lines.push({ line: number, text: line.text.trim() });
        });
        if (one.total > 0) all.push(one);
        setRead({ query: state.query, stages: position + 1 });
        setFound([...all]);
        await pause();
      }
    };
    const timer = state.query.trim() === "" ? undefined : setTimeout(() => void run(), 150);
    return () => { live = false; clearTimeout(timer); };
  }, [state.query]);
  const query = state.query.trim().toLowerCase();
  if (query === "") return <div class="page"><p>Type in the field above (key <kbd>/</kbd>). Words are found in every stage; <code>op:linear</code>, <code>path:layers.3</code> and <code>shape:16x512</code> look at ops, module paths and shapes. Several together ask for lines that have all of them.</p></div>;
  const kernels = model.kernels.filter((each) => each.name.toLowerCase().includes(query));
  const rows = model.ledger.filter((row) => row.parameters.some((each) => each.toLowerCase().includes(query)));
  const at = read.query === state.query ? read.stages : 0;
  const total = found.reduce((sum, each) => sum + each.total, 0);
  return (
    <div class="page" aria-live="polite">
      <p class="dim" data-testid="total">{count(total)} lines in {found.length} stages{at < model.stages.length ? `; reading stage ${at} of ${model.stages.length}` : ""}</p>
      {kernels.length > 0 && <h2>kernels</h2>}
      {kernels.slice(0, PER_STAGE).map((each) => <button key={each.name} class="link line" onClick={() => app.set({ selection: { kind: "kernel", name: each.name } })}>{each.name}</button>)}
      {kernels.length > PER_STAGE && <p class="dim">and {kernels.length - PER_STAGE} more</p>}
      {rows.length > 0 && <h2>parameters</h2>}
      {rows.slice(0, PER_STAGE).map((row) => <button key={row.parameters[0]} class="link line" onClick={() => app.set({ selection: { kind: "path", path: row.parameters[0]! } })}>{row.parameters.join(", ")}</button>)}
      {rows.length > PER_STAGE && <p class="dim">and {rows.length - PER_STAGE} more</p>}
      {found.map((each) => (
        <section key={each.stage}>
          <h2>{model.stages[each.stage]!.name} <span class="dim">{count(each.total)}</span></h2>
          {each.lines.map(({ line, text }) => (
            <button key={line} class="link line" onClick={() => goTo(app, each.stage, line)}>
              <span class="dim">{line + 1}</span> {text.length > 300 ? `${text.slice(0, 300)}…` : text}
            </button>
          ))}
          {each.total > each.lines.length && <p class="dim">and {count(each.total - each.lines.length)} more</p>}
        </section>
      ))}
    </div>
  );
}
