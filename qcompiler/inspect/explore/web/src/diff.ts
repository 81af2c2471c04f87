// What one text has that another has not.  Lines that occur once in each text anchor the rest (patience diff, B. Cohen);
// between anchors, the longest common subsequence, or everything where that would be too large.

export interface Difference {
  /** For each line of the left text the equal one of the right text, or -1. */
  right: Int32Array;
  left: Int32Array;
  /** Lines that are in both texts, at another place. */
  movedLeft: Map<number, number>;
  movedRight: Map<number, number>;
}

const LIMIT = 1_000_000;

export function diff(a: readonly string[], b: readonly string[]): Difference {
  const right = new Int32Array(a.length).fill(-1);
  const left = new Int32Array(b.length).fill(-1);
  const pair = (i: number, j: number) => { right[i] = j; left[j] = i; };
  const work: [number, number, number, number][] = [[0, a.length, 0, b.length]];
  while (work.length > 0) {
    let [a0, a1, b0, b1] = work.pop()!;
    while (a0 < a1 && b0 < b1 && a[a0] === b[b0]) pair(a0++, b0++);
    while (a0 < a1 && b0 < b1 && a[a1 - 1] === b[b1 - 1]) pair(--a1, --b1);
    if (a0 === a1 || b0 === b1) continue;
    const anchors = unique(a, b, a0, a1, b0, b1);
    if (anchors.length > 0) {
      let [i, j] = [a0, b0];
      for (const [x, y] of anchors) { pair(x, y); work.push([i, x, j, y]); i = x + 1; j = y + 1; }
      work.push([i, a1, j, b1]);
    } else if ((a1 - a0) * (b1 - b0) <= LIMIT) common(a, b, a0, a1, b0, b1, pair);
  }
  return { right, left, ...moved(a, b, right, left) };
}

/** Pairs of lines that occur once in each range, as the longest rising sequence. */
function unique(a: readonly string[], b: readonly string[], a0: number, a1: number, b0: number, b1: number) {
  const once = (lines: readonly string[], from: number, to: number) => {
    const at = new Map<string, number>();
    for (let i = from; i < to; i += 1) at.set(lines[i]!, at.has(lines[i]!) ? -1 : i);
    return at;
  };
  const inB = once(b, b0, b1);
  const pairs: [number, number][] = [];
  for (const [line, i] of once(a, a0, a1)) {
    const j = inB.get(line);
    if (i >= 0 && j !== undefined && j >= 0) pairs.push([i, j]);
  }
  pairs.sort((x, y) => x[0] - y[0]);
  const tails: number[] = [];
  const before: number[] = [];
  pairs.forEach(([, j], k) => {
    let [low, high] = [0, tails.length];
    while (low < high) { const mid = (low + high) >> 1; if (pairs[tails[mid]!]![1] < j) low = mid + 1; else high = mid; }
    before[k] = low > 0 ? tails[low - 1]! : -1;
    tails[low] = k;
  });
  const found: [number, number][] = [];
  for (let k = tails.at(-1) ?? -1; k >= 0; k = before[k]!) found.push(pairs[k]!);
  return found.reverse();
}

function common(
  a: readonly string[], b: readonly string[], a0: number, a1: number, b0: number, b1: number,
  pair: (i: number, j: number) => void,
) {
  const width = b1 - b0 + 1;
  const table = new Uint32Array((a1 - a0 + 1) * width);
  for (let i = a1 - 1; i >= a0; i -= 1)
    for (let j = b1 - 1; j >= b0; j -= 1) {
      const at = (i - a0) * width + (j - b0);
      table[at] = a[i] === b[j] ? table[at + width + 1]! + 1 : Math.max(table[at + width]!, table[at + 1]!);
    }
  for (let i = a0, j = b0; i < a1 && j < b1; ) {
    const at = (i - a0) * width + (j - b0);
    if (a[i] === b[j]) pair(i++, j++);
    else if (table[at + width]! >= table[at + 1]!) i += 1;
    else j += 1;
  }
}

function moved(a: readonly string[], b: readonly string[], right: Int32Array, left: Int32Array) {
  const added = new Map<string, number[]>();
  b.forEach((line, j) => {
    if (left[j] === -1 && line.length > 3) added.set(line, [...(added.get(line) ?? []), j]);
  });
  const movedLeft = new Map<number, number>();
  const movedRight = new Map<number, number>();
  a.forEach((line, i) => {
    const j = right[i] === -1 ? added.get(line)?.shift() : undefined;
    if (j !== undefined) { movedLeft.set(i, j); movedRight.set(j, i); }
  });
  return { movedLeft, movedRight };
}

/** The line of the other text that stands beside a line: its equal, its new place, or the nearest equal above. */
export function beside(pairs: Int32Array, movedTo: Map<number, number>, line: number): number {
  const exact = movedTo.get(line);
  if (exact !== undefined) return exact;
  for (let at = Math.min(line, pairs.length - 1); at >= 0; at -= 1) if (pairs[at]! >= 0) return pairs[at]! + (line - at);
  return line;
}
