// Cuts a line into coloured pieces.  Pieces are text; nothing here makes markup.

import type { Stage } from "./model";

export interface Piece { text: string; type: string; link: boolean }

const MLIR = new RegExp([
  /(?<s>"(?:[^"\\]|\\.)*")/, /(?<c>\/\/.*)/, /(?<v>%[\w$.-]+)/, /(?<y>@(?:"(?:[^"\\]|\\.)*"|[\w$.+-]+))/, /(?<b>\^\w+)/,
  /(?<t>![\w.]+|\b(?:tensor|index|memref|[fiu]\d+|bf16|ui8)\b)/, /(?<a>#[\w.]+)/, /(?<o>\b[a-z][a-z_0-9]*\.[a-zA-Z_]\w*)/,
  /(?<n>\b-?\d[\d.]*(?:e[+-]?\d+)?\b)/,
].map((each) => each.source).join("|"), "g");
const TORCH = new RegExp([
  /(?<c>#.*)/, /(?<t>"[^"]*")/, /(?<s>'[^']*')/, /(?<o>torch\.ops\.[\w.]+)/, /(?<k>\b(?:class|def|return|None|True|False)\b)/,
  /(?<w>\b[a-zA-Z_]\w*\b)/, /(?<n>\b\d[\d.]*\b)/,
].map((each) => each.source).join("|"), "g");
const CPP = new RegExp([
  /(?<c>\/\/.*)/, /(?<s>"(?:[^"\\]|\\.)*")/, /(?<a>^\s*#\s*\w+.*)/,
  /(?<k>\b(?:static|inline|const|constexpr|void|float|double|int|bool|char|if|else|for|while|return|struct|template|typename|extern|auto|switch|case|break|continue|unsigned|long|__global__|__device__|__shared__|__restrict__|asm|volatile|using|namespace)\b)/,
  /(?<t>\b(?:u?int(?:8|16|32|64)_t|size_t|__half\w*|__nv_bfloat16)\b)/, /(?<o>\b[qQ][a-zA-Z]?_\w+)/, /(?<n>\b(?:0x[\da-fA-F]+|\d[\d.]*(?:e[+-]?\d+)?)[fuLl]*\b)/,
].map((each) => each.source).join("|"), "g");

const LINKED = new Set(["v", "y", "w"]);

export function pieces(line: string, kind: Stage["kind"]): Piece[] {
  const found: Piece[] = [];
  let at = 0;
  for (const match of line.matchAll(kind === "mlir" ? MLIR : kind === "torch" ? TORCH : CPP)) {
    if (match.index > at) found.push({ text: line.slice(at, match.index), type: "", link: false });
    const type = Object.entries(match.groups ?? {}).find(([, text]) => text !== undefined)?.[0] ?? "";
    found.push({ text: match[0], type, link: LINKED.has(type) });
    at = match.index + match[0].length;
  }
  if (at < line.length) found.push({ text: line.slice(at), type: "", link: false });
  return found;
}
