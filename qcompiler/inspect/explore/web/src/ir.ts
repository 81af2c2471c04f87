// Reads the text of a stage, line by line: what a line defines, which region it opens, where its module path is.

import type { Stage } from "./model";

export interface Line {
  text: string;
  /** The line that opens the region around this one; -1 at the top. */
  parent: number;
  /** The last line of the region that this line opens; -1 if it opens none. */
  end: number;
  op: string;
  defs: string[];
  path: string;
  /** For diffs and for tracking an op from stage to stage: the text without the numbers of its values. */
  key: string;
}

export interface Code { kind: Stage["kind"]; lines: Line[]; defs: Map<string, number[]>; byPath: Map<string, number[]> }

const MLIR_DEF = /^\s*(%[\w$.:, %-]+?) = /;
const MLIR_OP = /^\s*(?:%[^=]*= )?"?([a-z][a-z_0-9]*\.[a-zA-Z_][\w.]*)/;
const MLIR_PATH = /qc\.path = "((?:[^"\\]|\\.)*)"/;
const SERVES = /serves = "((?:[^"\\]|\\.)*)"/;
/** The first weight that a launch reads. */
const WEIGHT = /^\s*rt\.(?:launch|select).*?<@"?w\.([\w$.+-]+?)(?:\.weight|\.bias)?"?,/;
const SYMBOL_DEF = /^\s*(?:rt\.(?:device|stream|arena|buffer|kernel|entry|event)|func\.func)\s+(@(?:"(?:[^"\\]|\\.)*"|[\w$.+-]+))/;
const TORCH_DEF = /^\s*(\w+)(?:: "[^"]*")? = /;

export function parse(text: string, kind: Stage["kind"]): Code {
  const raw = text.split("\n");
  if (raw.at(-1) === "") raw.pop();
  const code: Code = { kind, lines: [], defs: new Map(), byPath: new Map() };
  const stack: number[] = [];
  raw.forEach((line, number) => {
    const trimmed = line.trim();
    const closes = trimmed.startsWith("}");
    const opens = trimmed.endsWith("{") && kind !== "torch";
    const record: Line = { text: line, parent: stack.at(-1) ?? -1, end: -1, op: "", defs: [], path: "", key: "" };
    if (closes && !opens) {
      const opener = stack.pop();
      if (opener !== undefined) {
        const owner = code.lines[opener]!;
        owner.end = number;
        record.parent = owner.parent;
        if (owner.path === "") setPath(code, opener, line);
      }
    }
    code.lines.push(record);
    if (kind === "mlir") readMlir(record, line);
    else if (kind === "torch") readTorch(record, line);
    record.key = kind === "mlir" ? trimmed.replace(/%\d+/g, "%") : trimmed;
    if (!closes) setPath(code, number, line);
    for (const name of record.defs) {
      const at = code.defs.get(name);
      if (at) at.push(number); else code.defs.set(name, [number]);
    }
    if (opens && !closes) stack.push(number);
  });
  return code;
}

function setPath(code: Code, number: number, text: string): void {
  const found = code.kind === "mlir" ? (MLIR_PATH.exec(text) ?? SERVES.exec(text) ?? WEIGHT.exec(text)) : null;
  if (found === null || found[1] === "") return;
  const path = found[1]!.replace(/\\(.)/g, "$1");
  code.lines[number]!.path = path;
  const at = code.byPath.get(path);
  if (at) at.push(number); else code.byPath.set(path, [number]);
}

function readMlir(record: Line, line: string): void {
  record.op = MLIR_OP.exec(line)?.[1] ?? "";
  const results = MLIR_DEF.exec(line);
  if (results) record.defs = results[1]!.split(",").map((name) => name.trim().replace(/:\d+$/, ""));
  const trimmed = line.trimStart();
  if (trimmed.startsWith("^") || record.op === "func.func")
    record.defs = [...trimmed.matchAll(/(%[\w$.-]+): /g)].map((match) => match[1]!);
  const symbol = SYMBOL_DEF.exec(line);
  if (symbol) record.defs.unshift(symbol[1]!);
}

function readTorch(record: Line, line: string): void {
  const found = TORCH_DEF.exec(line);
  if (found) record.defs = [found[1]!];
  record.op = /= (torch\.ops\.[\w.]+|operator\.\w+)\(/.exec(line)?.[1] ?? "";
  if (/^\s*def \w+\(/.test(line)) record.defs = [...line.matchAll(/(\w+): "/g)].map((match) => match[1]!);
}

const isInside = (code: Code, line: number, region: number): boolean => {
  if (region === -1) return true;
  for (let at = line; at !== -1; at = code.lines[at]!.parent) if (at === region) return true;
  return false;
};

/** The line that defines `name` as it is seen from `line`; -1 if this text does not define it. */
export function definition(code: Code, name: string, line: number): number {
  const at = code.defs.get(name) ?? [];
  if (name.startsWith("@")) return at[0] ?? -1;
  for (let i = at.length - 1; i >= 0; i -= 1) {
    const where = at[i]!;
    if (where <= line && isInside(code, line, scopeOf(code, where))) return where;
  }
  return -1;
}

/** The region in which what a line defines can be seen. A function's arguments belong to its body. */
function scopeOf(code: Code, line: number): number {
  const record = code.lines[line]!;
  return record.op === "func.func" ? line : record.parent;
}

const escaped = (name: string) => name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

/** The lines that use what `line` defines under this name. */
export function uses(code: Code, name: string, line: number): number[] {
  const pattern = new RegExp(`${/^\w/.test(name) ? "\\b" : ""}${escaped(name)}(?![\\w$.-]*[\\w$-])`);
  const scope = name.startsWith("@") ? -1 : scopeOf(code, line);
  const [from, to] = scope === -1 ? [0, code.lines.length - 1] : [scope, code.lines[scope]!.end];
  const found: number[] = [];
  for (let at = from; at <= (to < 0 ? code.lines.length - 1 : to); at += 1)
    if (at !== line && pattern.test(code.lines[at]!.text) && definition(code, name, at) === line) found.push(at);
  return found;
}

/** The type that a line states for what it defines. */
export function typeOf(code: Code, name: string, line: number): string {
  const record = code.lines[line]!;
  if (code.kind === "torch") return new RegExp(`\\b${escaped(name)}: "([^"]*)"`).exec(record.text)?.[1] ?? "";
  const stated = new RegExp(`${escaped(name)}: `).exec(record.text);
  if (stated) return upTo(record.text.slice(stated.index + stated[0].length));
  const own = / : ((?:!|tensor|index|[fiu]\d|bf16|memref|\().*?)(?: (?:prologue )?\{)?$/.exec(record.text);
  if (own) return own[1]!;
  const closing = record.end >= 0 ? code.lines[record.end]!.text : "";
  return / -> (.*)$/.exec(closing)?.[1] ?? / : (.*)$/.exec(closing)?.[1] ?? "";
}

/** The text before the comma, brace or parenthesis that ends a type. */
function upTo(text: string): string {
  let depth = 0;
  for (let i = 0; i < text.length; i += 1) {
    const c = text[i]!;
    if ("<[(".includes(c)) depth += 1;
    else if (">])".includes(c)) { if (depth === 0) return text.slice(0, i); depth -= 1; }
    else if (depth === 0 && (c === "," || c === " ")) return text.slice(0, i);
  }
  return text;
}

/** `file.py:84 in forward, code: y = self.f(x)`: the line of the model above an op of the torch graph. */
export function sourceLine(code: Code, line: number): string {
  for (let at = line; code.kind === "torch" && at >= 0; at -= 1) {
    const found = /^\s*# (File: .*|No stacktrace.*)$/.exec(code.lines[at]!.text);
    if (found) return found[1]!.startsWith("File: ") ? found[1]!.slice(6) : "";
  }
  return "";
}

/** The number of a step of the plan, for a line of a schedule: its entry point and its place in it. */
export function stepAt(code: Code, line: number): { entry: string; number: number } | null {
  const parent = code.lines[line]!.parent;
  if (parent < 0 || code.lines[parent]!.op !== "rt.entry") return null;
  const entry = /rt\.entry @(?:"([^"]*)"|([\w$.-]+))/.exec(code.lines[parent]!.text);
  let number = 0;
  for (let at = parent + 1; at < line; at += 1) if (code.lines[at]!.parent === parent && isStep(code.lines[at]!)) number += 1;
  return isStep(code.lines[line]!) && entry ? { entry: entry[1] ?? entry[2] ?? "", number } : null;
}

const isStep = (line: Line) => /^rt\.(launch|select|copy|record|wait|torch_call)$/.test(line.op);
