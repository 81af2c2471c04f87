// Takes the pictures of docs/tutorial.md from an explorer page in headless Chromium: see explorer_pictures.py.
// Arguments: the page, the folder for the pictures.
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { deflateSync } from "node:zlib";
import { browser, searchFor } from "./explorer_page.mjs";

const [, , file, folder] = process.argv;
const { context, page } = await browser({ width: 1100, height: 520 });

/** The pixels of a picture in up to 64 colours, the most frequent ones: text and lines have few. */
const indexed = (png) => page.evaluate(async (data) => {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const { data: pixels } = context.getImageData(0, 0, image.width, image.height);
  const counts = new Map();
  const key = (at) => (pixels[at] << 16) | (pixels[at + 1] << 8) | pixels[at + 2];
  for (let at = 0; at < pixels.length; at += 4) counts.set(key(at), (counts.get(key(at)) ?? 0) + 1);
  const colours = [...counts].sort((a, b) => b[1] - a[1]).map(([colour]) => colour);
  const palette = [];
  const distance = (a, b) => ((a >> 16) - (b >> 16)) ** 2 + (((a >> 8) & 255) - ((b >> 8) & 255)) ** 2 + ((a & 255) - (b & 255)) ** 2;
  for (const colour of colours) // a colour that is near one of the palette adds nothing
    if (palette.length < 64 && palette.every((each) => distance(each, colour) > 400)) palette.push(colour);
  const nearest = new Map(colours.map((colour) => [colour, palette.reduce((best, each, i) => (distance(each, colour) < distance(palette[best], colour) ? i : best), 0)]));
  return { width: image.width, height: image.height, palette, places: Array.from({ length: pixels.length / 4 }, (_, i) => nearest.get(key(4 * i))) };
}, png.toString("base64"));

const CRC = Array.from({ length: 256 }, (_, n) => { for (let k = 0; k < 8; k += 1) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1; return n >>> 0; });
const crc = (bytes) => (bytes.reduce((sum, byte) => CRC[(sum ^ byte) & 255] ^ (sum >>> 8), 0xffffffff) ^ 0xffffffff) >>> 0;
const u32 = (value) => { const bytes = Buffer.alloc(4); bytes.writeUInt32BE(value >>> 0); return bytes; };
const chunk = (type, data) => { const body = Buffer.concat([Buffer.from(type), data]); return Buffer.concat([u32(data.length), body, u32(crc(body))]); };

/** A PNG with a palette (PNG specification, colour type 3). */
function encoded({ width, height, palette, places }) {
  const rows = Buffer.alloc((width + 1) * height);
  for (let y = 0; y < height; y += 1) for (let x = 0; x < width; x += 1) rows[y * (width + 1) + 1 + x] = places[y * width + x];
  return Buffer.concat([
    Buffer.from([137, 80, 78, 71, 13, 10, 26, 10]), chunk("IHDR", Buffer.concat([u32(width), u32(height), Buffer.from([8, 3, 0, 0, 0])])),
    chunk("PLTE", Buffer.from(palette.flatMap((colour) => [colour >> 16, (colour >> 8) & 255, colour & 255]))),
    chunk("IDAT", deflateSync(rows, { level: 9 })), chunk("IEND", Buffer.alloc(0)),
  ]);
}

const taken = {};
const take = async (name) => {
  await page.waitForTimeout(300);
  const picture = encoded(await indexed(await page.screenshot()));
  writeFileSync(join(folder, `explorer-${name}.png`), picture);
  taken[name] = picture.length;
};

await page.goto(`file://${file}`);
await page.waitForSelector(".row");
await searchFor(page, "op:qc.linear");
await page.locator("section", { hasText: "fuse-epilogues" }).first().locator(".line").first().click();
await page.waitForSelector(".row.selected");
await page.keyboard.press("Escape");
await page.keyboard.press("d");
await page.waitForSelector(".column:nth-child(2) .row");
await take("diff");
await page.keyboard.press("d");
await page.locator(".row .t-o", { hasText: "qc.linear" }).first().waitFor();
await page.locator(".row", { hasText: 'qc.path = "up"' }).filter({ hasText: "qc.linear" }).first().locator(".t-v").first().click();
await page.waitForSelector(".panel .listing .row");
await page.waitForSelector(".panel .history");
await take("value");
await page.keyboard.press("Escape");
await page.keyboard.press("3");
await page.waitForSelector(".box");
await take("graph");
await context.close();
console.log(JSON.stringify(taken));
