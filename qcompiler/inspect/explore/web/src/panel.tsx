// What is known of the thing that was clicked: a value, a step, a kernel or a module.

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Listing } from "./code";
import { type Code, definition, sourceLine, stepAt, typeOf, uses } from "./ir";
import { bytesText, count, dbText, type Entry, expand, type Kernel, type LayerSnr, layersOf, linesOf, modulesOf, sizesText, type Step, stepsOf, timeText } from "./model";
import { type App, codeOf, goTo, pause, useApp } from "./state";

const MOST = 40;

export function Panel() {
  const app = useApp();
  const { selection } = app.state;
  if (selection === null) return null;
  return (
    <aside class="panel" aria-label="details">
      <button class="close" aria-label="close details" onClick={() => app.set({ selection: null })}>×</button>
      {selection.kind === "value" && <Value key={`${selection.stage} ${selection.line} ${selection.name}`} {...selection} />}
      {selection.kind === "step" && <StepDetails entry={selection.entry} number={selection.number} />}
      {selection.kind === "kernel" && <KernelDetails name={selection.name} />}
      {selection.kind === "path" && <><h2>{selection.path}</h2><dl><Source path={selection.path} /></dl><Path path={selection.path} /></>}
    </aside>
  );
}

function Row(props: { label: string; children: ComponentChildren }) {
  return <div class="fact"><dt>{props.label}</dt><dd>{props.children}</dd></div>;
}

// --- values ----------------------------------------------------------------------------------------------------------

function Value(props: { stage: number; line: number; name: string }) {
  const app = useApp();
  const stage = app.model.stages[props.stage]!;
  const [code, setCode] = useState<Code | null>(null);
  useEffect(() => { void codeOf(stage.text, stage.kind).then(setCode); }, [stage.text]);
  if (code === null || code.lines[props.line] === undefined) return <p>unpacking…</p>;
  const name = props.name || code.lines[props.line]!.defs[0] || "";
  const from = name === "" ? -1 : definition(code, name, props.line);
  const at = from >= 0 ? from : props.line;
  const line = code.lines[at]!;
  const users = from >= 0 ? uses(code, name, from) : [];
  const source = sourceLine(code, at);
  const symbol = (name.startsWith("@") ? name : kernelAround(code, at)).replace(/^@"?|"$/g, "");
  const kernel = app.model.kernels.find((each) => each.name === symbol);
  const launch = stepAt(code, at);
  return (
    <>
      <h2>{name || line.op || `line ${at + 1}`}</h2>
      <dl>
        {line.op && <Row label="op">{line.op}</Row>}
        {from >= 0 && <Row label="type"><code>{typeOf(code, name, from) || "none stated"}</code></Row>}
        {line.path && <Row label="module"><button class="link" onClick={() => app.set({ selection: { kind: "path", path: line.path } })}>{line.path}</button></Row>}
        {from >= 0 && <Row label="defined"><LineLink app={app} stage={props.stage} line={from} name={name} code={code} /></Row>}
        {name !== "" && from < 0 && <Row label="defined">not in this text</Row>}
        {from >= 0 && <Row label={`used ${users.length} ×`}>
          {users.slice(0, MOST).map((each) => <LineLink key={each} app={app} stage={props.stage} line={each} name={name} code={code} />)}
          {users.length > MOST && <span class="dim">and {users.length - MOST} more</span>}
        </Row>}
        {code.kind === "torch" && <Row label="source">{source ? <code>{source}</code> : <span class="dim">torch kept no line for this op</span>}</Row>}
        {code.kind === "mlir" && line.path !== "" && <Source path={line.path} />}
      </dl>
      {launch !== null && <StepDetails entry={launch.entry} number={launch.number} />}
      {kernel && <KernelFacts kernel={kernel} />}
      {line.path !== "" && launch === null && !kernel && <Path path={line.path} />}
    </>
  );
}

/** The lines of the model that became ops at a module path. */
function Source(props: { path: string }) {
  const { model } = useApp();
  const lines = linesOf(model, props.path);
  if (Object.keys(model.lines).length === 0) return null;
  return (
    <Row label={lines.length > 1 ? "source, one of" : "source"}>
      {lines.slice(0, MOST).map((line) => <div key={line.text} title={line.text}><code>{withoutFolder(line.text)}</code> <span class="dim">{line.ops.join(", ")}</span></div>)}
      {lines.length === 0 && <span class="dim">no line of the model: the compiler made it, or it is a parameter</span>}
      {lines.length > MOST && <span class="dim">and {lines.length - MOST} more</span>}
    </Row>
  );
}

/** `net.py:12 in forward: …`: the folder is in the title. */
const withoutFolder = (line: string) => line.replace(/^[^:]*\//, "");

/** What the errors of a value are. */
function ErrorRows(props: { rows: LayerSnr[] }) {
  return (
    <>
      {props.rows.map((row) => (
        <Row key={row.value} label="error">
          {row.path} <b>{row.op}</b>: {[["program against float", row.model], ["program against oracle", row.oracle], ["oracle against float", row.quantised]]
            .filter(([, ratio]) => ratio !== null).map(([what, ratio]) => `${what} ${dbText(ratio as LayerSnr["oracle"])}`).join(", ") || "nothing to compare with"}
        </Row>
      ))}
    </>
  );
}

/** The symbol of the kernel in whose body a line of a schedule is; "" elsewhere. */
function kernelAround(code: Code, line: number): string {
  for (let at = line; at >= 0; at = code.lines[at]!.parent) if (code.lines[at]!.op === "rt.kernel") return code.lines[at]!.defs[0] ?? "";
  return "";
}

function LineLink(props: { app: App; stage: number; line: number; name: string; code: Code }) {
  const text = props.code.lines[props.line]!.text.trim();
  return (
    <button class="link line" onClick={() => goTo(props.app, props.stage, props.line, props.name)}>
      <span class="dim">{props.line + 1}</span> {text.length > 160 ? `${text.slice(0, 160)}…` : text}
    </button>
  );
}

// --- modules ---------------------------------------------------------------------------------------------------------

function Path(props: { path: string }) {
  const app = useApp();
  const served = stepsOf(app.model, props.path);
  const wanted = new Set(modulesOf(props.path));
  const rows = app.model.ledger.filter((row) => row.parameters.some((each) => wanted.has(modulesOf(each)[0]!)));
  const decisions = app.model.decisions.filter((each) => modulesOf(each.path).some((path) => wanted.has(path)));
  const first = served[0];
  return (
    <>
      {first ? <>
        <h3>{first.exact ? "ended in" : "no launch of its own; around or inside it"}</h3>
        {served.slice(0, MOST).map(({ entry, step }) => <StepLink key={`${entry.name} ${step.number}`} entry={entry} step={step} />)}
        {served.length > MOST && <p class="dim">and {served.length - MOST} more</p>}
        {first.exact && first.step.kernel !== "" && <KernelByName name={first.step.kernel} />}
      </> : <p class="dim">No launch names this module: it may have become part of another.</p>}
      {rows.length > 0 && <h3>parameters</h3>}
      {rows.map((row) => (
        <p key={row.parameters[0]}><code>{row.parameters.join(", ")}</code><br />{row.shape.join("×") || "scalar"} {row.dtype}, stored as {row.bytesAfter ? row.format || row.dtype : "nothing"}, {bytesText(row.bytesAfter)} {row.reason && <span class="dim">({row.reason})</span>}</p>
      ))}
      {decisions.length > 0 && <h3>decisions</h3>}
      {decisions.map((each, i) => <p key={i}><b>{each.stage}</b> {each.what}{each.why && <><br /><span class="dim">{each.why}</span></>}</p>)}
      <History path={props.path} />
    </>
  );
}

/** The ops of a module path in every stage. */
function History(props: { path: string }) {
  const app = useApp();
  const [found, setFound] = useState<{ stage: number; lines: number[]; ops: string }[] | null>(null);
  useEffect(() => {
    let live = true;
    const scan = async () => {
      const out: { stage: number; lines: number[]; ops: string }[] = [];
      for (const [position, stage] of app.model.stages.entries()) {
        if (stage.kind !== "mlir") continue;
        const code = await codeOf(stage.text, stage.kind);
        if (!live) return;
        const lines = code.byPath.get(props.path) ?? [];
        const counts = new Map<string, number>();
        lines.forEach((line) => counts.set(code.lines[line]!.op, (counts.get(code.lines[line]!.op) ?? 0) + 1));
        out.push({ stage: position, lines, ops: [...counts].map(([op, n]) => (n > 1 ? `${n} ${op}` : op)).join(", ") });
        await pause();
      }
      if (live) setFound(out);
    };
    setFound(null);
    void scan();
    return () => { live = false; };
  }, [props.path]);
  if (found === null) return <p class="dim">reading the stages…</p>;
  return (
    <>
      <h3>in each stage</h3>
      {found.map(({ stage, lines, ops }) => (
        <button key={stage} class="link history" disabled={lines.length === 0} onClick={() => goTo(app, stage, lines[0]!)}>
          <span>{app.model.stages[stage]!.name}</span> <span class="dim">{ops || "not there"}</span>
        </button>
      ))}
    </>
  );
}

// --- steps and kernels -----------------------------------------------------------------------------------------------

export function StepLink(props: { entry: Entry; step: Step }) {
  const app = useApp();
  const { entry, step } = props;
  return (
    <button class="link line" onClick={() => app.set({ selection: { kind: "step", entry: entry.name, number: step.number } })}>
      <span class="dim">{entry.name} {step.number}</span> {step.kernel || step.kind} {step.alone !== null && <span class="dim">{timeText(step.alone)} {step.measured ? "measured" : "estimated"}</span>}
    </button>
  );
}

function StepDetails(props: { entry: string; number: number }) {
  const app = useApp();
  const entry = app.model.entries.find((each) => each.name === props.entry);
  const step = entry?.steps[props.number];
  if (entry === undefined || step === undefined) return null;
  return (
    <>
      <h2>{step.kind} {step.number} of {entry.name}</h2>
      <dl>
        {step.place && <Row label="module"><button class="link" onClick={() => app.set({ selection: { kind: "path", path: step.place } })}>{step.place}</button>{step.inferred && <span class="dim"> from the launches around it</span>}</Row>}
        <Row label="stream">{step.stream}</Row>
        {step.event && <Row label="event">{step.event}</Row>}
        {step.alone !== null && <Row label="time">{timeText(step.alone)} {step.measured ? `measured on ${entry.measuredOn}` : `estimated for ${entry.device}`}{step.critical ? ", on the critical path" : ""}</Row>}
        {step.begin !== null && <Row label="runs">{timeText(step.begin)} to {timeText(step.end)}</Row>}
        {step.nbytes > 0 && <Row label="moves">{bytesText(step.nbytes)}, {count(step.operations)} operations{sizesText(entry) && ` at ${sizesText(entry)}`}</Row>}
        {step.views.length > 0 && <Row label="operands">{step.views.map((view, i) => <code key={i} class="block">{view}</code>)}</Row>}
        <ErrorRows rows={layersOf(app.model, entry.name, step.number).slice(0, 1)} />
        {step.kernels.length > 1 && <Row label="may run">{step.kernels.join(", ")}</Row>}
      </dl>
      {step.kernel && <KernelByName name={step.kernel} />}
    </>
  );
}

function KernelByName(props: { name: string }) {
  const kernel = useApp().model.kernels.find((each) => each.name === props.name);
  return kernel ? <KernelFacts kernel={kernel} /> : null;
}

function KernelDetails(props: { name: string }) {
  const { model } = useApp();
  const kernel = model.kernels.find((each) => each.name === props.name);
  if (kernel === undefined) return null;
  const steps = model.entries.flatMap((entry) => entry.steps.filter((step) => step.kernels.includes(kernel.name)).map((step) => ({ entry, step })));
  return (
    <>
      <KernelFacts kernel={kernel} />
      <h3>launched by {steps.length} steps</h3>
      {steps.slice(0, MOST).map(({ entry, step }) => <StepLink key={`${entry.name} ${step.number}`} entry={entry} step={step} />)}
      {steps.length > MOST && <p class="dim">and {steps.length - MOST} more</p>}
    </>
  );
}

function KernelFacts(props: { kernel: Kernel }) {
  const { kernel } = props;
  const { model } = useApp();
  const [code, setCode] = useState<Code | null>(null);
  useEffect(() => { setCode(null); void codeOf(kernel.source, "source").then(setCode); }, [kernel.source]);
  return (
    <>
      <h3>kernel {kernel.name}</h3>
      <dl>
        <Row label="template">{kernel.template}, {kernel.engine}</Row>
        {kernel.serves && <Row label="first for">{expand(kernel.serves).join(", ")}</Row>}
        <Row label="launch">{kernel.launch}</Row>
        {kernel.symbols.length > 0 && <Row label="sizes">{kernel.symbols.join(", ")}</Row>}
        <Row label="operands">{kernel.operands.map((each) => <code key={each} class="block">{each}</code>)}</Row>
        {kernel.resources && <Row label="uses">{kernel.resources}</Row>}
        {kernel.notes.length > 0 && <Row label="notes">{kernel.notes.map((each) => <div key={each}>{each}</div>)}</Row>}
      </dl>
      <h3>source, {model.facts.kind === "cpu" ? "C++" : "CUDA C++"}{code && <span class="dim"> {code.lines.length} lines</span>}</h3>
      <div class="listing">{code ? <Listing code={code} label={`kernel-${kernel.number}`} /> : "unpacking…"}</div>
      {kernel.sass >= 0 && <Sass kernel={kernel} />}
    </>
  );
}

/** A kernel's machine code. */
function Sass(props: { kernel: Kernel }) {
  const { kernel } = props;
  const [code, setCode] = useState<Code | null>(null);
  useEffect(() => { setCode(null); void codeOf(kernel.sass, "source").then(setCode); }, [kernel.sass]);
  return (
    <>
      <h3>machine code, SASS{code && <span class="dim"> {code.lines.length} lines</span>}</h3>
      <div class="listing">{code ? <Listing code={code} label={`sass-${kernel.number}`} /> : "unpacking…"}</div>
    </>
  );
}
