// An explorer page in headless Chromium, for the scripts that look at one.
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium } from "playwright-core";

/** A browser with a profile of its own, and its one empty page. */
export async function browser({ width, height, colorScheme = "light" }) {
  const context = await chromium.launchPersistentContext(mkdtempSync(join(tmpdir(), "qc-explorer-")), {
    executablePath: process.env.QC_CHROMIUM ?? "/usr/bin/chromium", headless: true, timeout: 180_000, colorScheme,
    viewport: { width, height },
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
      "--disable-component-update", "--disable-sync"],
  });
  const page = context.pages()[0] ?? (await context.newPage());
  page.setDefaultTimeout(120_000);
  return { context, page };
}

/** Types a query into the page's search, and waits until all stages were searched. */
export async function searchFor(page, query) {
  await page.keyboard.press("Escape"); // in the field, "/" is a character
  await page.keyboard.press("/"); // selects the last query
  await page.keyboard.type(query);
  await page.waitForFunction(() => {
    const total = document.querySelector("[data-testid=total]")?.textContent ?? "reading";
    return !total.includes("reading") && !total.startsWith("0 lines");
  });
}
