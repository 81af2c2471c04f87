// Opens explorer pages in headless Chromium and reports what it saw as JSON: see test_explorer_browser.py.
// Arguments: the page, the folder for the screenshots, the width, "light" or "dark".
import { join } from "node:path";
import { browser, searchFor } from "./explorer_page.mjs";

const [, , file, shots, width, colorScheme] = process.argv;
const { context, page } = await browser({ width: Number(width), height: 800, colorScheme });
const seen = { console: [], requests: [], contrast: [], overflow: [] };
page.on("console", (message) => seen.console.push(`${message.type()}: ${message.text()}`));
page.on("pageerror", (error) => seen.console.push(`error: ${error.message}`));
page.on("dialog", (dialog) => { seen.console.push(`dialog: ${dialog.message()}`); void dialog.dismiss(); });
page.on("request", (request) => {
  if (!request.url().startsWith("file:") && !request.url().startsWith("data:")) seen.requests.push(request.url());
});

/** The contrast of each text with what is behind it, by WCAG 2; those under 4.5 are reported. */
const lowContrast = (where) => page.evaluate((tab) => {
  const parse = (text) => (text.match(/[\d.]+/g) ?? []).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll("#app *:not(svg *)")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim() !== "");
    if (!own || element.disabled || element.tagName === "OPTION" || element.getClientRects().length === 0) continue;
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${tab}: ${element.className || element.tagName} '${element.textContent.slice(0, 30)}' ${ratio.toFixed(2)}`);
  }
  return low;
}, where);
const look = async (name) => {
  await page.waitForTimeout(200);
  await page.screenshot({ path: join(shots, `${name}-${width}-${colorScheme}.png`) });
  seen.contrast.push(...(await lowContrast(name)));
  if (await page.evaluate(() => document.documentElement.scrollWidth > window.innerWidth)) seen.overflow.push(name);
};
const text = (selector) => page.locator(selector).first().innerText();

const started = Date.now();
await page.goto(`file://${file}`);
await page.waitForSelector(".row");
seen.openMs = Date.now() - started;
seen.stages = await page.locator(".list .stage").count();
seen.grey = await page.locator(".list .stage.same").allInnerTexts();
await look("stages");

// From a value to its kernel, by the mouse.
await searchFor(page, "op:qc.linear");
await look("search");
seen.found = await text("[data-testid=total]");
await searchFor(page, "op:qc.linear path:up");
seen.both = await text("[data-testid=total]");
await searchFor(page, "op:qc.linear");
await page.locator("section", { hasText: "fuse-epilogues" }).first().locator(".line").first().click();
await page.waitForSelector(".row.selected");
seen.selected = await text(".row.selected .text");
await page.locator(".row.selected .t-v").first().click();
await page.waitForSelector(".panel .listing .row");
await page.waitForSelector(".panel .history");
seen.panel = await text(".panel");
await look("value");

// Keys only: close, compare with the stage before, go to a difference, fold, open a line.
await page.keyboard.press("Escape");
seen.closed = (await page.locator(".panel").count()) === 0;
await page.keyboard.press("d");
await page.waitForSelector(".column:nth-child(2) .row");
await page.waitForTimeout(200);
seen.inSight = await page.locator(".column:nth-child(2) .row.cursor .text").innerText();
seen.changes = await text(".changes");
for (let i = 0; i < 80 && !(await page.evaluate(() => document.activeElement?.matches(".column:nth-child(2) .code"))); i += 1)
  await page.keyboard.press("Tab");
seen.reached = await page.evaluate(() => document.activeElement?.className);
await page.keyboard.press("n");
await page.waitForTimeout(100);
seen.difference = await page.evaluate(() => document.querySelector(".column:nth-child(2) .row.cursor")?.className);
await look("diff");
await page.keyboard.press("Home");
const rows = () => page.evaluate(() => document.querySelector(".column:nth-child(2) .rows").clientHeight);
const before = await rows();
await page.keyboard.press("f");
await page.waitForTimeout(100);
seen.folded = [before, await rows()];
await page.keyboard.press("f");
await page.keyboard.press("ArrowDown");
await page.keyboard.press("Enter");
await page.waitForSelector(".panel h2");
seen.byKeys = await text(".panel h2");
await page.keyboard.press("Escape");

for (const [key, name] of [["3", "graph"], ["4", "kernels"], ["5", "ledger"], ["6", "decisions"], ["7", "memory"], ["8", "timeline"], ["9", "errors"], ["0", "about"]]) {
  await page.keyboard.press(key);
  await look(name);
  seen[name] = await text(".main");
}
await page.keyboard.press("3");
await page.locator(".tools select").nth(1).selectOption("error");
await look("graph-errors");
seen.graphErrors = await text(".main");
seen.boxes = await page.locator(".box").count();
await page.locator(".box").first().focus();
await page.keyboard.press("Enter");
await page.waitForSelector(".panel .listing .row");
seen.step = await text(".panel");
await page.keyboard.press("Escape");
await page.keyboard.press("5");
const heads = page.locator("thead button", { hasText: "bytes after" });
await heads.click();
seen.largest = await text("tbody tr");
await heads.click();
seen.smallest = await text("tbody tr");
seen.images = await page.locator("img").count();
seen.title = await page.title();
await context.close();
console.log(JSON.stringify(seen));
