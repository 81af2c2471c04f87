// Builds ../explorer.js and ../explorer.css from src/.  The first line of the script records the digest of the
// sources, so that a test without node sees whether the bundle is theirs (page.py computes the same digest).
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const folder = process.argv[2] ?? "..";
const names = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"];
names.push(...readdirSync("src").sort().map((name) => `src/${name}`));
const digest = createHash("sha256");
for (const name of names) {
  digest.update(`${name}\n`);
  digest.update(readFileSync(name));
  digest.update("\0");
}

const common = { bundle: true, minify: true, write: false, target: ["es2022"], charset: "utf8", legalComments: "none" };
const script = await build({
  ...common, entryPoints: ["src/main.tsx"], format: "iife", jsx: "automatic", jsxImportSource: "preact",
});
const styles = await build({ ...common, entryPoints: ["src/style.css"] });
const text = `/* sources ${digest.digest("hex")} */\n${script.outputFiles[0].text}`;
if (/<\/script|<!--/i.test(text)) {
  throw new Error("the bundle holds text that would end its script element");
}
mkdirSync(folder, { recursive: true });
writeFileSync(`${folder}/explorer.js`, text);
writeFileSync(`${folder}/explorer.css`, styles.outputFiles[0].text);
