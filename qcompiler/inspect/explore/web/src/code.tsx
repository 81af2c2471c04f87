// A text in rows of one height, of which only the visible ones exist.  Regions and modules fold.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { pieces } from "./highlight";
import type { Code } from "./ir";
import { blockOf } from "./model";

export const ROW = 18;
/** The most characters of a line on the screen: signatures of whole models have hundreds of thousands. */
const WIDEST = 4000;

export interface Group { from: number; to: number; path: string; ops: number }
interface Row { line: number; group: Group | null }

/** Runs of ops in one body that belong to one module. */
export function groupsOf(code: Code): Group[] {
  const groups: Group[] = [];
  const open = new Map<number, Group>();
  code.lines.forEach((line, number) => {
    if (line.op === "" || line.op === "func.func" || /^rt\.(?!launch|select)/.test(line.op)) return;
    const block = blockOf(line.path);
    const last = open.get(line.parent);
    const to = line.end >= 0 ? line.end : number;
    if (last !== undefined && (block === "" || block === last.path)) {
      if (block !== "") last.to = to;
      last.ops += block === "" ? 0 : 1;
    } else if (block !== "") {
      const group = { from: number, to, path: block, ops: 1 };
      open.set(line.parent, group);
      groups.push(group);
    }
  });
  return groups.filter((group) => group.ops > 1 && isBody(code, code.lines[group.from]!.parent));
}

const isBody = (code: Code, parent: number) => parent >= 0 && /^(func\.func|rt\.entry)$/.test(code.lines[parent]!.op);

function rowsOf(code: Code, folded: ReadonlySet<number>, groups: readonly Group[], shut: ReadonlySet<number>): Row[] {
  const starts = new Map(groups.filter((group) => shut.has(group.from)).map((group) => [group.from, group]));
  const rows: Row[] = [];
  for (let at = 0; at < code.lines.length; at += 1) {
    const group = starts.get(at);
    if (group !== undefined) { rows.push({ line: at, group }); at = group.to; continue; }
    rows.push({ line: at, group: null });
    if (folded.has(at) && code.lines[at]!.end > at) at = code.lines[at]!.end;
  }
  return rows;
}

export interface CodeProps {
  code: Code;
  label: string;
  selected: number;
  name: string;
  target: { line: number } | null;
  /** A line that another column asks for; -1 for none. */
  follow: number;
  /** The pixels of that row that are scrolled away. */
  part: number;
  marks: (line: number) => string;
  onPick: (line: number, name: string) => void;
  onTop: (line: number, part: number) => void;
}

export function CodeView(props: CodeProps) {
  const { code, selected, name } = props;
  const box = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(600);
  const [folded, setFolded] = useState<ReadonlySet<number>>(new Set());
  const [shut, setShut] = useState<ReadonlySet<number>>(new Set());
  const [cursor, setCursor] = useState(0);
  const quiet = useRef(false);
  const reached = useRef<{ line: number } | null>(null);
  const groups = useMemo(() => groupsOf(code), [code]);
  const rows = useMemo(() => rowsOf(code, folded, groups, shut), [code, folded, groups, shut]);
  const widest = useMemo(
    () => Math.min(WIDEST, code.lines.reduce((most, line) => Math.max(most, line.text.length), 0)), [code],
  );
  useEffect(() => { setFolded(new Set()); setShut(new Set()); setCursor(0); }, [code]);
  useLayoutEffect(() => {
    const element = box.current;
    if (element === null) return undefined;
    const observer = new ResizeObserver(() => setHeight(element.clientHeight));
    observer.observe(element);
    setHeight(element.clientHeight);
    return () => observer.disconnect();
  }, []);

  const indexOf = (line: number) => {
    let [low, high] = [0, rows.length - 1];
    while (low < high) { const mid = (low + high + 1) >> 1; if (rows[mid]!.line <= line) low = mid; else high = mid - 1; }
    return low;
  };
  useEffect(() => {
    if (props.target === null || props.target === reached.current || box.current === null) return;
    const { line } = props.target;
    for (let at = code.lines[line]?.parent ?? -1; at >= 0; at = code.lines[at]!.parent)
      if (folded.has(at)) { toggle(setFolded, folded, at); return; }
    const hiding = groups.find((group) => shut.has(group.from) && group.from < line && line <= group.to);
    if (hiding) { toggle(setShut, shut, hiding.from); return; }
    reached.current = props.target;
    setCursor(indexOf(line));
    box.current.scrollTop = Math.max(0, indexOf(line) * ROW - height / 3);
  }, [props.target, code, folded, shut]);
  useEffect(() => {
    if (props.follow < 0 || box.current === null) return;
    quiet.current = true;
    box.current.scrollTop = indexOf(Math.min(props.follow, code.lines.length - 1)) * ROW + props.part;
  }, [props.follow, props.part]);

  const onScroll = () => {
    const at = box.current?.scrollTop ?? 0;
    setTop(at);
    if (quiet.current) quiet.current = false;
    else props.onTop(rows[Math.min(rows.length - 1, Math.floor(at / ROW))]?.line ?? 0, at % ROW);
  };
  const first = Math.max(0, Math.floor(top / ROW) - 10);
  const shown = rows.slice(first, Math.ceil((top + height) / ROW) + 10);
  const fold = (row: Row) => {
    if (row.group !== null) toggle(setShut, shut, row.group.from);
    else if (code.lines[row.line]!.end > row.line) toggle(setFolded, folded, row.line);
  };
  const move = (to: number) => {
    const next = Math.max(0, Math.min(rows.length - 1, to));
    setCursor(next);
    const element = box.current;
    if (element === null) return;
    if (next * ROW < element.scrollTop) element.scrollTop = next * ROW;
    else if ((next + 1) * ROW > element.scrollTop + element.clientHeight) element.scrollTop = (next + 1) * ROW - element.clientHeight;
  };
  const change = (from: number, step: number) => {
    const inRun = (at: number) => props.marks(rows[at]!.line) !== "";
    let at = from;
    while (at >= 0 && at < rows.length && inRun(at)) at += step;
    while (at >= 0 && at < rows.length && !inRun(at)) at += step;
    if (at >= 0 && at < rows.length) move(at);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const page = Math.floor(height / ROW) - 2;
    const row = rows[cursor];
    const keys: Record<string, () => void> = {
      ArrowDown: () => move(cursor + 1), ArrowUp: () => move(cursor - 1), PageDown: () => move(cursor + page),
      PageUp: () => move(cursor - page), Home: () => move(0), End: () => move(rows.length - 1),
      n: () => change(cursor, 1), p: () => change(cursor, -1),
      f: () => row && fold(row),
      m: () => setShut(shut.size > 0 ? new Set() : new Set(groups.map((group) => group.from))),
      Enter: () => row && props.onPick(row.line, code.lines[row.line]!.defs[0] ?? ""),
    };
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : keys[event.key];
    if (act === undefined) return;
    act();
    event.preventDefault();
    event.stopPropagation();
  };
  const onClick = (event: MouseEvent) => {
    const element = event.target as HTMLElement;
    const row = rows[Number(element.closest<HTMLElement>("[data-row]")?.dataset.row ?? -1)];
    if (row === undefined) return;
    setCursor(rows.indexOf(row));
    if (element.dataset.fold !== undefined) fold(row);
    else if (row.group === null) props.onPick(row.line, element.dataset.name ?? code.lines[row.line]!.defs[0] ?? "");
  };
  return (
    <div class="code" ref={box} tabIndex={0} role="listbox" aria-label={props.label} aria-activedescendant={`${props.label}-${cursor}`}
      onScroll={onScroll} onClick={onClick} onKeyDown={onKeyDown}>
      <div class="rows" style={{ height: `${rows.length * ROW}px`, minWidth: `${widest + 9}ch` }}>
        {shown.map((row, i) => {
          const index = first + i;
          const line = code.lines[row.line]!;
          const states = `${index === cursor ? " cursor" : ""}${row.group === null && row.line === selected ? " selected" : ""}`;
          const canFold = row.group !== null || line.end > row.line;
          const open = row.group === null && !folded.has(row.line);
          return (
            <div key={row.line} id={`${props.label}-${index}`} role="option" aria-selected={row.line === selected} data-row={index}
              class={`row ${props.marks(row.line)}${states}`} style={{ transform: `translateY(${index * ROW}px)` }}>
              <span class="number">{row.line + 1}</span>
              <span class="fold" data-fold={canFold ? "" : undefined} aria-hidden="true">{canFold ? (open ? "▾" : "▸") : ""}</span>
              {row.group !== null
                ? <span class="group" data-fold="">{"    "}{row.group.path} · {row.group.ops} ops</span>
                : <LineText text={line.text} kind={code.kind} name={name} tail={open ? "" : " … }"} />}
            </div>
          );
        })}
      </div>
    </div>
  );
}

function toggle(set: (value: ReadonlySet<number>) => void, old: ReadonlySet<number>, item: number) {
  const next = new Set(old);
  if (!next.delete(item)) next.add(item);
  set(next);
}

function LineText(props: { text: string; kind: Code["kind"]; name: string; tail: string }) {
  const long = props.text.length > WIDEST;
  return (
    <span class="text">
      {pieces(long ? props.text.slice(0, WIDEST) : props.text, props.kind).map((piece, i) => piece.type === "" ? piece.text : (
        <span key={i} class={`t-${piece.type}${piece.text === props.name ? " same" : ""}`}
          data-name={piece.link ? piece.text : undefined}>{piece.text}</span>
      ))}
      {long && <span class="cut"> … {props.text.length - WIDEST} more characters</span>}
      {props.tail && <span class="cut">{props.tail}</span>}
    </span>
  );
}

/** A short text in colours, such as the source of a kernel. */
export function Listing(props: { code: Code; label: string }) {
  return (
    <CodeView code={props.code} label={props.label} selected={-1} name="" target={null} follow={-1} part={0} marks={() => ""}
      onPick={() => undefined} onTop={() => undefined} />
  );
}
