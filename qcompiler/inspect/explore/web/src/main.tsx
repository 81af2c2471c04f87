// The page: its tabs, its keys, and what it shows when its data cannot be read.

import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Memory, Timeline } from "./charts";
import { Errors } from "./errors";
import { Graph } from "./graph";
import { loadModel, type Model } from "./model";
import { Panel } from "./panel";
import { Search } from "./search";
import { Stages } from "./stages";
import { type App, AppContext, type State, type Tab, TABS } from "./state";
import { About, Decisions, Kernels, Ledger } from "./tables";

const PAGES: Record<Tab, () => preact.JSX.Element> = {
  Stages, Search, Graph, Kernels, Ledger, Decisions, Memory, Timeline, Errors, About,
};

const KEYS: [string, string][] = [
  ["1 … 9 0", "the pages"], ["/", "search all stages"], ["[ ]", "the stage before, the stage behind"],
  ["d", "compare with the stage before"], ["Esc", "close the details"], ["t", "light or dark"], ["?", "this list"],
  ["↑ ↓ Page Home End", "in a text: move"], ["Enter", "in a text: details of the line"], ["f", "in a text: fold the region or module"],
  ["m", "in a text: fold all modules"], ["n p", "in a text: the next or previous difference"], ["+ - 0", "in a graph: zoom, fit"],
];

function start(model: Model): State {
  const last = model.stages.findLastIndex((stage) => stage.kind === "mlir" && "func.func" in stage.ops);
  return {
    tab: model.stages.length > 0 ? "Stages" : "Kernels", columns: [Math.max(0, last)], column: 0, selection: null, last: null, target: null,
    query: "", theme: "", help: false, entry: model.entries[0]?.name ?? "",
  };
}

function Explorer(props: { model: Model }) {
  const { model } = props;
  const [state, setState] = useState<State>(() => start(model));
  const set = (change: Partial<State>) => setState((old) => {
    const last = change.selection?.kind === "value" ? change.selection : old.last;
    return { ...old, ...change, last };
  });
  const app: App = { model, state, set };
  const search = useRef<HTMLInputElement>(null);
  useEffect(() => { document.documentElement.dataset.theme = state.theme; }, [state.theme]);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      const typing = (event.target as Element).closest("input, select, textarea") !== null;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") { set({ selection: null, help: false }); (document.activeElement as HTMLElement | null)?.blur(); return; }
      if (typing) return;
      if (act(event.key, app, search.current)) event.preventDefault();
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  });
  const tabs = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const [box, tab] = [tabs.current, tabs.current?.querySelector<HTMLElement>("[aria-selected=true]")];
    if (box && tab) box.scrollLeft = tab.offsetLeft - box.offsetLeft - (box.clientWidth - tab.clientWidth) / 2;
  }, [state.tab]);
  const Page = PAGES[state.tab];
  return (
    <AppContext.Provider value={app}>
      <header class="bar">
        <h1 title={model.facts.source}>{model.facts.title}</h1>
        <div class="tabs" role="tablist" ref={tabs}>
          {TABS.map((tab, i) => <button key={tab} role="tab" aria-selected={tab === state.tab} title={`key ${(i + 1) % 10}`} onClick={() => set({ tab })}>{tab}</button>)}
        </div>
        <input ref={search} type="search" placeholder="search all stages  ( / )" aria-label="search all stages" value={state.query}
          onInput={(event) => set({ query: event.currentTarget.value, tab: "Search" })} />
        <button aria-label="light or dark" title="light or dark (t)" onClick={() => set({ theme: other(state.theme) })}>◐</button>
        <button aria-label="keys" title="keys (?)" onClick={() => set({ help: !state.help })}>?</button>
      </header>
      <main class={state.selection === null ? "" : "with-panel"}>
        <div class="main" role="tabpanel" aria-label={state.tab}><Page /></div>
        <Panel />
      </main>
      {state.help && <dialog open aria-label="keys"><dl>{KEYS.map(([key, what]) => <div class="fact" key={key}><dt><kbd>{key}</kbd></dt><dd>{what}</dd></div>)}</dl><button onClick={() => set({ help: false })}>close</button></dialog>}
    </AppContext.Provider>
  );
}

function other(theme: State["theme"]): State["theme"] {
  const dark = theme === "" ? matchMedia("(prefers-color-scheme: dark)").matches : theme === "dark";
  return dark ? "light" : "dark";
}

/** What a key does; false if it means nothing here. */
function act(key: string, app: App, search: HTMLInputElement | null): boolean {
  const { model, state, set } = app;
  const current = state.columns[state.column] ?? 0;
  const show = (stage: number) => set({ columns: state.columns.map((each, i) => (i === state.column ? stage : each)), tab: "Stages", target: null });
  const tab = /^\d$/.test(key) ? TABS[(Number(key) + 9) % 10] : undefined;
  if (tab !== undefined) set({ tab });
  else if (key === "/") { search?.focus(); search?.select(); }
  else if (key === "?") set({ help: !state.help });
  else if (key === "t") set({ theme: other(state.theme) });
  else if (key === "[" && current > 0) show(current - 1);
  else if (key === "]" && current < model.stages.length - 1) show(current + 1);
  else if (key === "d" && model.stages.length > 1) {
    const pair = [Math.max(0, current - 1), Math.max(1, current)];
    const last = state.last?.stage === current ? { stage: current, line: state.last.line } : null; // stays in sight
    set({ tab: "Stages", target: last, ...(state.columns.length > 1 ? { columns: [current], column: 0 } : { columns: pair, column: 1 }) });
  } else return false;
  return true;
}

const root = document.getElementById("app")!;
loadModel().then(
  (model) => render(<Explorer model={model} />, root),
  (error: unknown) => { root.textContent = `This page cannot be shown: ${String(error)}`; },
);
