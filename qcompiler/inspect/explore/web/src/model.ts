// The records of qcompiler/inspect/explore/model.py, and the unpacking of the page's data.

export interface Facts {
  title: string; qcompiler: string; kind: string; isa: string; origin: string; source: string; devices: string[];
}
export interface Stage {
  index: number; name: string; kind: "torch" | "mlir" | "source"; seconds: number | null; changed: boolean;
  lines: number; ops: Record<string, number>; delta: Record<string, number>; text: number;
}
export interface Kernel {
  number: number; name: string; template: string; serves: string; operands: string[]; symbols: string[];
  digest: string; engine: string; launch: string; notes: string[]; source: number; sass: number; resources: string;
}
export interface Step {
  number: number; kind: string; stream: string; place: string; inferred: boolean; kernels: string[]; kernel: string;
  template: string; reads: string[]; writes: string[]; views: string[]; formats: string[]; event: string;
  begin: number | null; end: number | null; alone: number | null; nbytes: number; operations: number;
  measured: boolean; critical: boolean;
}
export interface Entry {
  name: string; ranges: Record<string, [number, number]>; symbols: Record<string, number>; inputs: string[];
  outputs: string[]; device: string; measuredOn: string; streams: Record<string, string>; span: number; serial: number; steps: Step[];
  edges: [string, number, number][];
}
export interface Buffer {
  name: string; offset: number; nbytes: number; first: number; last: number; weight: string;
}
export interface Arena {
  name: string; device: string; kind: string; nbytes: number; entry: string; buffers: Buffer[];
}
export interface LedgerLine {
  parameters: string[]; shape: number[]; dtype: string; format: string; reason: string; bits: number;
  bytesBefore: number; bytesAfter: number; padding: number;
}
export interface Decision {
  stage: string; path: string; what: string; why: string; sort: "idiom" | "missed" | "kernel" | "other";
}
export interface SourceLine { text: string; ops: string[] }
/** A ratio of signal to noise in decibels. */
export type Db = number | "exact" | "not finite" | null;
export interface ResultSnr { name: string; oracle: Db; model: Db }
export interface LayerSnr {
  path: string; op: string; value: string; quantised: Db; oracle: Db; model: Db; entry: string; step: number;
}
export interface StageSnr { stage: string; before: Db; start: Db; oracle: Db; model: Db }
export interface Errors {
  inputs: string[]; entry: string; results: ResultSnr[]; layers: LayerSnr[]; stages: StageSnr[]; notes: string[];
}
export interface Model {
  version: number; facts: Facts; absent: string[]; stages: Stage[]; kernels: Kernel[]; entries: Entry[];
  arenas: Arena[]; ledger: LedgerLine[]; totals: Record<string, string | number | null>; decisions: Decision[];
  lines: Record<string, SourceLine[]>; errors: Errors | null;
}

const VERSION = 3;

async function unpack(id: string): Promise<string> {
  const packed = document.getElementById(id)?.textContent ?? "";
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

export async function loadModel(): Promise<Model> {
  const model = JSON.parse(await unpack("model")) as Model;
  if (model.version !== VERSION) throw new Error(`this page reads models of version ${VERSION}, not ${model.version}`);
  return model;
}

const texts = new Map<number, Promise<string>>();

/** A text of the page, unpacked once. */
export function textOf(number: number): Promise<string> {
  let text = texts.get(number);
  if (text === undefined) texts.set(number, (text = unpack(`text-${number}`)));
  return text;
}

// --- module paths ----------------------------------------------------------------------------------------------------

/** `a.q+k` is `a.q` and `a.k`: the names that plan/paths.py joins. */
export function expand(path: string): string[] {
  const [first = "", ...rest] = path.split("+");
  const parts = first.split(".");
  const out = [first];
  for (const each of rest) {
    const shared = parts.slice(0, Math.max(0, parts.length - each.split(".").length));
    out.push([...shared, each].join("."));
  }
  return out;
}

const bare = (path: string) => path.replace(/\.(weight|bias)$/, "");

export const modulesOf = (path: string) => (path === "" ? [] : expand(path).map(bare));

const stepPaths = new WeakMap<Step, Set<string>>();

/** The modules that a step serves: that of its place, and those of the weights that it reads. */
export function pathsOf(step: Step): Set<string> {
  let found = stepPaths.get(step);
  if (found === undefined) {
    found = new Set(modulesOf(step.place));
    for (const buffer of step.reads) if (buffer.startsWith("w.")) modulesOf(buffer.slice(2)).forEach((p) => found!.add(p));
    stepPaths.set(step, found);
  }
  return found;
}

export interface Served { entry: Entry; step: Step; exact: boolean }

/** The steps that compute what a module path names; failing that, those inside or around that module. */
export function stepsOf(model: Model, path: string): Served[] {
  const wanted = modulesOf(path);
  if (wanted.length === 0) return [];
  const exact: Served[] = [];
  const near: Served[] = [];
  for (const entry of model.entries)
    for (const step of entry.steps) {
      const own = pathsOf(step);
      if (wanted.some((each) => own.has(each))) exact.push({ entry, step, exact: true });
      else if ([...own].some((p) => wanted.some((each) => p.startsWith(`${each}.`) || each.startsWith(`${p}.`))))
        near.push({ entry, step, exact: false });
    }
  return exact.length > 0 ? exact : near;
}

/** The model's lines that became ops at a module path, each once. */
export function linesOf(model: Model, path: string): SourceLine[] {
  const found = new Map<string, SourceLine>();
  for (const each of path === "" ? [] : [...expand(path), ...modulesOf(path)])
    for (const line of model.lines[each] ?? []) found.set(line.text, line);
  return [...found.values()];
}

/** `model.layers.3` of `model.layers.3.mlp.up_proj`: up to the first number, else the first two parts. */
export function blockOf(path: string): string {
  const parts = (expand(path)[0] ?? "").split(".");
  const number = parts.findIndex((part) => /^\d+$/.test(part));
  return parts.slice(0, number < 0 ? 2 : number + 1).join(".");
}

// --- figures ---------------------------------------------------------------------------------------------------------

export const count = (value: number) => value.toLocaleString("en-GB");

export function bytesText(value: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit === 0 ? value : value.toFixed(value < 10 ? 2 : 1)} ${units[unit]}`;
}

/** `b=3, s=32`, the sizes of an entry point's times and bytes; "" if it has no dynamic size. */
export const sizesText = (entry: Entry) => Object.entries(entry.symbols).map(([name, value]) => `${name}=${value}`).join(", ");

/** What the times of an entry point are: measured and on what, or estimated and for what. */
export function originText(entry: Entry): string {
  const works = entry.steps.filter((step) => step.begin !== null);
  const measured = works.filter((step) => step.measured).length;
  const estimated = `estimated for ${entry.device}`;
  if (measured === 0) return `${estimated}, not measured`;
  if (measured === works.length) return `measured on ${entry.measuredOn}`;
  return `${measured} of ${works.length} launches measured on ${entry.measuredOn}, the others ${estimated}`;
}

/** `52.3 dB`, `exact`; "" for nothing. */
export const dbText = (ratio: Db) => (ratio === null ? "" : typeof ratio === "string" ? ratio : `${ratio.toFixed(1)} dB`);

/** For sorting, and for colours: "exact" is more than every number, "not finite" less; null is more than that. */
export const dbRank = (ratio: Db) => (ratio === null ? 1e9 : ratio === "exact" ? 1e6 : ratio === "not finite" ? -1e6 : ratio);

/** The rows of the values that a step wrote. */
export const layersOf = (model: Model, entry: string, step: number) =>
  model.errors?.layers.filter((row) => row.step === step && row.entry === entry) ?? [];

/** The ratio that a reader asks about first: against the float model, where there is one. */
export const firstDb = (row: { oracle: Db; model: Db }) => row.model ?? row.oracle;

export function timeText(us: number | null): string {
  if (us === null) return "";
  return us >= 1e6 ? `${(us / 1e6).toFixed(2)} s` : us >= 1000 ? `${(us / 1000).toFixed(2)} ms` : `${us.toFixed(2)} µs`;
}
