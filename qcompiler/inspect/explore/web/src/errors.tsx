// Ratios of signal to noise: of the results, of each stage, of each value of the model.

import { type Db, dbRank, dbText, type LayerSnr, type ResultSnr, type StageSnr } from "./model";
import { goTo, useApp } from "./state";
import { Table } from "./tables";

interface Ratio<T> { name: string; value: (row: T) => number; show: (row: T) => string; numeric: boolean }

/** A column of ratios; "-" where there is nothing to compare with. */
const ratio = <T,>(name: string, of: (row: T) => Db): Ratio<T> => ({ name, value: (row) => dbRank(of(row)), show: (row) => dbText(of(row)) || "-", numeric: true });

export function Errors() {
  const app = useApp();
  const { errors, stages } = app.model;
  if (errors === null) return <p class="empty">No errors were measured for this page. In Python: prog.explore("page.html", error=prog.errors(x, model=model)). Of a file: qc inspect model.qca --html page.html --error x.npz --model package.module:function</p>;
  const open = (row: StageSnr) => {
    const position = stages.findIndex((stage) => stage.name === row.stage);
    if (position >= 0) goTo(app, position, 0);
  };
  return (
    <div class="page">
      <p>Signal-to-noise ratios in decibels of <b>{errors.entry}</b>({errors.inputs.join(", ")}): 20 dB are an error of a tenth, 40 dB of a hundredth. The oracle is the quantised model in the framework it came from.</p>
      {errors.notes.map((note) => <p key={note} class="dim">{note}</p>)}
      <h2>Results</h2>
      <Table<ResultSnr> label="results" rows={errors.results} columns={[
        { name: "result", value: (row) => row.name },
        ratio("program / oracle", (row) => row.oracle), ratio("program / float", (row) => row.model),
      ]} />
      <h2>Layers <span class="dim">values of the model in the order in which they are computed</span></h2>
      <Table<LayerSnr> label="layers" rows={errors.layers} open={(row) => app.set({ selection: row.step >= 0 ? { kind: "step", entry: row.entry, number: row.step } : { kind: "path", path: row.path } })} columns={[
        { name: "module", value: (row) => row.path, show: (row) => row.path || "(the model)" },
        { name: "operator", value: (row) => row.op },
        { name: "written by", value: (row) => row.step, show: (row) => (row.step >= 0 ? `${row.entry} ${row.step}` : "fused, or a view"), numeric: true },
        ratio("oracle / float", (row) => row.quantised), ratio("program / oracle", (row) => row.oracle), ratio("program / float", (row) => row.model),
      ]} />
      <h2>Stages <span class="dim">the worst result of the interpreter after each stage that changed the program</span></h2>
      <Table<StageSnr> label="errors of stages" rows={errors.stages} open={open} columns={[
        { name: "stage", value: (row) => row.stage },
        ratio("against the stage before", (row) => row.before), ratio("against the import", (row) => row.start),
        ratio("against the oracle", (row) => row.oracle), ratio("against float", (row) => row.model),
      ]} />
    </div>
  );
}
