// What the page shows: one object, changed by `set`, and the parsed texts.

import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { type Code, parse } from "./ir";
import { type Model, type Stage, textOf } from "./model";

export const TABS = ["Stages", "Search", "Graph", "Kernels", "Ledger", "Decisions", "Memory", "Timeline", "Errors", "About"] as const;
export type Tab = (typeof TABS)[number];

export type Selection =
  | { kind: "value"; stage: number; line: number; name: string }
  | { kind: "step"; entry: string; number: number }
  | { kind: "kernel"; name: string }
  | { kind: "path"; path: string };

export interface State {
  tab: Tab;
  /** Positions of the stages that stand side by side. */
  columns: number[];
  column: number;
  selection: Selection | null;
  /** The value that was selected last, also after its details were closed. */
  last: { stage: number; line: number } | null;
  /** A line to scroll to; a new object scrolls again. */
  target: { stage: number; line: number } | null;
  query: string;
  theme: "" | "light" | "dark";
  help: boolean;
  entry: string;
}

export interface App { model: Model; state: State; set: (change: Partial<State>) => void }

export const AppContext = createContext<App | null>(null);

export function useApp(): App {
  const app = useContext(AppContext);
  if (app === null) throw new Error("no app around this component");
  return app;
}

const codes = new Map<string, Promise<Code>>();

/** The text of a stage or of a kernel, parsed once. */
export function codeOf(text: number, kind: Stage["kind"]): Promise<Code> {
  const key = `${text} ${kind}`;
  let code = codes.get(key);
  if (code === undefined) codes.set(key, (code = textOf(text).then((each) => parse(each, kind))));
  return code;
}

/** Shows a line of a stage: in the column that has the stage, else in the active one. */
export function goTo(app: App, stage: number, line: number, name = ""): void {
  const { columns, column } = app.state;
  const shown = columns.indexOf(stage);
  const next = shown >= 0 ? columns : columns.map((each, i) => (i === Math.min(column, columns.length - 1) ? stage : each));
  app.set({
    tab: "Stages", columns: next, column: next.indexOf(stage), target: { stage, line },
    selection: { kind: "value", stage, line, name },
  });
}

/** Lets the browser draw between two pieces of long work. */
export const pause = () => new Promise<void>((done) => { setTimeout(done, 0); });
