/** The published package: what `npm pack` takes, and the examples of both READMEs, compiled strictly and run with it. */

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { promisify } from "node:util";
import { VERSION } from "../src/options.js";
import { type Answer, FakeServer, full, invalid } from "./fake-server.js";

const run = promisify(execFile);
const PACKAGE = join(import.meta.dirname, "..", "..");
const CONSUMER = join(PACKAGE, "build", "consumer");
const EXAMPLES = [join(PACKAGE, "README.md"), join(PACKAGE, "..", "..", "README.md")].flatMap((path) =>
  [...readFileSync(path, "utf8").matchAll(/```ts\n(.*?)```/gs)].map(([, code]) => code ?? ""),
);
const COMMON_JS = EXAMPLES[0]?.replace(/\n(.*)$/s, "\n(async () => {$1})();") ?? "";
const ANSWER: Answer = { texts: ["It is", " here."] };
const CALLS: Answer = { calls: [{ id: "1", name: "track", arguments: '{"order":7}' }] };
/** What the server does for each example in turn, and what the example then prints. */
const SHOWN: [example: number, answer: Answer | Answer[], output: RegExp][] = [
  [0, ANSWER, /^It is here\.\n1\.5\n$/],
  [1, ANSWER, /^It is here\.3\n$/],
  [2, { end: "hangs" }, /^the request was cancelled\n$/],
  [3, { end: invalid }, /^temperature low\n$/],
  [3, { end: full("-1") }, /^QUEUE_FULL undefined r-1\n$/],
  [4, ANSWER, /^It is here\.\n$/],
  [5, ANSWER, /^fake [0-9a-f]{32}\n$/],
  [6, [CALLS, ANSWER], /^track \{ order: 7 \}\nIt is here\.\n$/],
  [7, ANSWER, /^tenants\/acme 2\n$/],
  [8, ANSWER, /^2 texts are stored\n16n\n$/],
  [9, ANSWER, /^It is here\.$/],
  [10, ANSWER, /^It is here\.\n1\.5\n$/],
];

test("the package runs the examples of the READMEs, and is a CommonJS module too", async () => {
  rmSync(CONSUMER, { recursive: true, force: true });
  const installed = join(CONSUMER, "node_modules", "draftwood-client");
  mkdirSync(installed, { recursive: true });
  const pack = ["pack", "--json", "--ignore-scripts", "--pack-destination", CONSUMER];
  const [{ filename, files, version }] = JSON.parse((await run("npm", pack, { cwd: PACKAGE })).stdout);
  await run("tar", ["--extract", "--file", join(CONSUMER, filename), "--strip-components=1", "-C", installed]);
  const paths: string[] = files.map(({ path }: { path: string }) => path);
  const others = paths.filter((path) => !/^dist\/.*\.(js|d\.ts)$/.test(path));
  assert.deepEqual(others.sort(), ["LICENSE", "README.md", "dist/cjs/package.json", "package.json"]);
  assert.equal(version, VERSION);
  const programs = [...EXAMPLES.map((code, index) => [`${index}.mts`, code] as const), ["10.cts", COMMON_JS] as const];
  for (const [name, code] of programs) writeFileSync(join(CONSUMER, name), code);
  const compilerOptions = { strict: true, module: "node16", target: "es2022", types: ["node"] };
  writeFileSync(join(CONSUMER, "tsconfig.json"), JSON.stringify({ compilerOptions, include: ["*.*ts"] }));
  const compiled = await run(join(PACKAGE, "node_modules", ".bin", "tsc"), ["-p", CONSUMER]).catch((error) => error);
  assert.equal(compiled.stdout, "");
  assert.equal(EXAMPLES.length, 10);
  for (const [example, answer, output] of SHOWN) {
    const server = await FakeServer.start();
    server.script = [answer].flat();
    const path = join(CONSUMER, example === 10 ? "10.cjs" : `${example}.mjs`);
    writeFileSync(path, readFileSync(path, "utf8").replaceAll(/127\.0\.0\.1:\d+/g, server.target));
    assert.match((await run(process.execPath, [path])).stdout, output);
    server.stop();
  }
});
