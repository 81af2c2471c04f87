// Opens an explorer page in headless Chromium and prints times in seconds as JSON: see explorer_size.py.
import { browser, searchFor } from "./explorer_page.mjs";

const [, , file] = process.argv;
const { context, page } = await browser({ width: 1280, height: 800 });
const seconds = async (act) => { const began = performance.now(); await act(); return (performance.now() - began) / 1000; };
const drawn = () => page.evaluate(() => new Promise((done) => { requestAnimationFrame(() => requestAnimationFrame(() => done())); }));

const seen = { pages: {} };
seen.open = await seconds(async () => { await page.goto(`file://${file}`); await page.waitForSelector(".row"); });
for (const [key, name] of [["3", "Graph"], ["4", "Kernels"], ["5", "Ledger"], ["6", "Decisions"], ["7", "Memory"], ["8", "Timeline"], ["1", "Stages"]])
  seen.pages[name] = await seconds(async () => { await page.keyboard.press(key); await drawn(); });
await page.waitForSelector(".row");
seen.frame = await page.evaluate(() => new Promise((done) => {
  const box = document.querySelector(".code");
  let [longest, last, count] = [0, performance.now(), 0];
  const frame = (now) => {
    longest = Math.max(longest, now - last);
    last = now;
    box.scrollTop += 400;
    if ((count += 1) < 60) requestAnimationFrame(frame); else done(longest / 1000);
  };
  requestAnimationFrame((now) => { last = now; frame(now); });
}));
seen.search = await seconds(() => searchFor(page, "op:qc.linear"));
await context.close();
console.log(JSON.stringify(seen));
