// Colours of categories and of amounts, legible on the light and on the dark ground.

/** Eight colours that stay apart for colour-blind readers (after Okabe and Ito, 2008), at a middle lightness; then two
 * that programs with many kinds of kernels need. */
const COLOURS = ["#3b82c4", "#d08a1d", "#2e9e76", "#c2588f", "#7a74c9", "#b5622b", "#5b98a9", "#8b8f3a", "#8d949e", "#b04a4a"];
const given = new Map<string, string>();

/** The same name has the same colour on every part of the page. */
export function colourOf(name: string): string {
  let colour = given.get(name);
  if (colour === undefined) given.set(name, (colour = COLOURS[given.size % COLOURS.length]!));
  return colour;
}

/** From pale to strong, for a share of the largest amount. */
export function heat(share: number): string {
  const strength = Math.sqrt(Math.max(0, Math.min(1, share)));
  return `color-mix(in oklab, var(--heat-high) ${Math.round(100 * strength)}%, var(--heat-low))`;
}
