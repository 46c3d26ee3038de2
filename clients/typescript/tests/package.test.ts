/** The published package: what `npm pack` takes, and the examples of both READMEs, compiled strictly and run with it. */

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { before, test } from "node:test";
import { promisify } from "node:util";
import { status } from "@grpc/grpc-js";
import { VERSION } from "../src/version.js";
import { answers, type Behaviour, FakeServer, fails, full, reason, silent, violation } from "./fake-server.js";

const run = promisify(execFile);
const PACKAGE = join(import.meta.dirname, "..", "..");
const TSC = join(PACKAGE, "node_modules", ".bin", "tsc");
const CONSUMER = join(PACKAGE, "build", "consumer");
const READMES = [join(PACKAGE, "README.md"), join(PACKAGE, "..", "..", "README.md")];
const EXAMPLES = READMES.flatMap((path) => [...readFileSync(path, "utf8").matchAll(/```ts\n(.*?)```/gs)]).map(
  ([, code]) => code,
);

const ANSWER = answers("It is", " here.");
const CALL = answers("Let me see. <tool_call>", '{"name": "track", "arguments": {"order": 7}}</tool_call>');
const BAD = fails({
  code: status.INVALID_ARGUMENT,
  message: "sampling.temperature: -1",
  details: [reason("INVALID_VALUE"), violation("sampling.temperature", "-1 is not allowed")],
});

/** For each example in turn: what the server does, and what the example then prints. */
const SHOWN: [behaviour: Behaviour, output: RegExp][][] = [
  [[ANSWER, /^It is here\.\n1\.5\n$/]],
  [[ANSWER, /^It is here\.stop\n$/]],
  [[silent, /^the request was cancelled\n$/]],
  [
    [BAD, /^sampling\.temperature -1 is not allowed\n$/],
    [full("-1"), /^QUEUE_FULL undefined [0-9a-f]{32}\n$/],
  ],
  [[ANSWER, /^It is here\.\n$/]],
  [[ANSWER, /^fake [0-9a-f]{32}\n$/]],
  [[CALL, /^Let me see\.\ntrack \{"order": 7\}\n$/]],
  [[ANSWER, /^tenants\/acme 2\n$/]],
  [[ANSWER, /^2 texts are stored\n16n\n$/]],
  [[ANSWER, /^It is here\.$/]],
];

let packed: string[];

before(async () => {
  rmSync(CONSUMER, { recursive: true, force: true });
  const installed = join(CONSUMER, "node_modules", "draftwood-client");
  mkdirSync(installed, { recursive: true });
  const pack = ["pack", "--json", "--ignore-scripts", "--pack-destination", CONSUMER];
  const [made] = JSON.parse((await run("npm", pack, { cwd: PACKAGE })).stdout);
  packed = made.files.map((file: { path: string }) => file.path);
  await run("tar", ["--extract", "--file", join(CONSUMER, made.filename), "--strip-components=1", "-C", installed]);
  writeFileSync(join(CONSUMER, "package.json"), '{ "type": "module", "private": true }');
  for (const [index, code] of EXAMPLES.entries()) {
    writeFileSync(join(CONSUMER, `example${index}.ts`), code ?? "");
  }
  const compilerOptions = { strict: true, module: "nodenext", target: "es2022", types: ["node"] };
  writeFileSync(join(CONSUMER, "tsconfig.json"), JSON.stringify({ compilerOptions, include: ["."] }));
  const compiled = await run(TSC, ["--project", CONSUMER]).catch((error) => error);
  assert.equal(compiled.stdout, "");
});

test("the package has code, types, README and licence, and nothing else", () => {
  const others = packed.filter((path) => !/^dist\/.*\.(js|d\.ts)$/.test(path));
  assert.deepEqual(others.sort(), ["LICENSE", "README.md", "dist/cjs/package.json", "package.json"]);
  for (const path of packed.filter((one) => one.endsWith(".js"))) {
    assert.ok(packed.includes(path.replace(/\.js$/, ".d.ts")), path);
  }
  assert.ok(packed.includes("dist/index.js"));
});

test("there is an expectation for each example", () => assert.equal(EXAMPLES.length, SHOWN.length));

SHOWN.forEach((cases, index) => {
  test(`example ${index} of the READMEs`, async () => {
    const path = join(CONSUMER, `example${index}.js`);
    const code = readFileSync(path, "utf8");
    for (const [behaviour, output] of cases) {
      const server = await FakeServer.start();
      server.script = [behaviour];
      assert.match(code, /(127\.0\.0\.1|localhost):50051/);
      writeFileSync(path, code.replace(":50051", `:${server.port}`));
      assert.match((await run(process.execPath, [path], { timeout: 60_000 })).stdout, output);
      server.stop();
    }
  });
});

const REQUIRING = `
import { AdminClient, Client, NO_RETRY, StatusError } from "draftwood-client";
async function main(target: string): Promise<void> {
  const client = new Client(target, { retry: NO_RETRY });
  console.log((await client.chat("where?")).text);
  await client.chat("where?").catch((error: unknown) => console.log(error instanceof StatusError));
  client.close();
  new AdminClient(target).close();
}
main(process.argv[2] ?? "");
`;

test("a CommonJS program requires it, with its types", async () => {
  const folder = join(CONSUMER, "commonjs");
  mkdirSync(folder, { recursive: true });
  writeFileSync(join(folder, "package.json"), '{ "type": "commonjs", "private": true }');
  writeFileSync(join(folder, "program.ts"), REQUIRING);
  const compilerOptions = { strict: true, module: "node16", target: "es2022", types: ["node"] };
  writeFileSync(join(folder, "tsconfig.json"), JSON.stringify({ compilerOptions, include: ["."] }));
  const compiled = await run(TSC, ["--project", folder]).catch((error) => error);
  assert.equal(compiled.stdout, "");
  const path = join(folder, "program.js");
  assert.match(readFileSync(path, "utf8"), /require\("draftwood-client"\)/);
  const server = await FakeServer.start();
  server.script = [ANSWER, BAD];
  const { stdout } = await run(process.execPath, [path, `127.0.0.1:${server.port}`], { timeout: 60_000 });
  assert.equal(stdout, "It is here.\ntrue\n");
  server.stop();
});

test("the version is that of package.json", () => {
  const { version } = JSON.parse(readFileSync(join(PACKAGE, "package.json"), "utf8"));
  assert.equal(VERSION, version);
});
