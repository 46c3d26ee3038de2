/** What the environment and single calls set: address, credentials, TLS, deadline, headers. */

import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { AdminClient, Client } from "draftwood-client";
import { FakeServer, silent } from "./fake-server.js";

const before = { ...process.env };
let server: FakeServer;

beforeEach(async () => {
  server = await FakeServer.start();
  for (const name of Object.keys(process.env).filter((one) => one.startsWith("DRAFTWOOD_"))) {
    delete process.env[name];
  }
});

afterEach(() => {
  server.stop();
  Object.assign(process.env, before);
});

test("address, tenant and key come from the environment", async () => {
  Object.assign(process.env, {
    DRAFTWOOD_TARGET: server.target,
    DRAFTWOOD_TENANT: "acme",
    DRAFTWOOD_API_KEY: "secret",
  });
  using client = new Client();
  assert.equal((await client.chat("x")).tenant, "acme");
  using own = new Client(undefined, { tenant: "other", token: "mine" });
  assert.equal((await own.chat("x")).tenant, "other");
  using header = new Client(undefined, { metadata: { Authorization: "Basic b" } });
  await header.chat("x");
  using admin = new AdminClient();
  await admin.tenants.getTenant({ name: "tenants/a" });
  assert.deepEqual(server.headers.flat(), ["Bearer secret", "Bearer mine", "Basic b", "Bearer secret"]);
});

test("a key of the environment is not sent in clear text", () => {
  process.env.DRAFTWOOD_API_KEY = "secret";
  const message = /^DRAFTWOOD_API_KEY: would be sent to example.org:1 in clear text/;
  assert.throws(() => new Client("example.org:1"), { name: "ArgumentError", message });
  new Client("example.org:1", { tls: true }).close();
  process.env.DRAFTWOOD_TLS = "1";
  new Client("example.org:1").close();
  process.env.DRAFTWOOD_TOKEN = "another";
  assert.throws(() => new Client(), { message: /^DRAFTWOOD_TOKEN: cannot be combined with DRAFTWOOD_API_KEY/ });
});

test("wrong variables are named", () => {
  for (const [name, value] of [
    ["DRAFTWOOD_TIMEOUT", "soon"],
    ["DRAFTWOOD_TLS", "maybe"],
    ["DRAFTWOOD_TLS_CA", "/no/such"],
  ] as const) {
    process.env[name] = value;
    assert.throws(() => new Client(), { name: "ArgumentError", message: new RegExp(`^${name}: `) });
    delete process.env[name];
  }
});

test("there is a deadline unless it is switched off", async () => {
  const deadline = async (options: object, call: object = {}) => {
    using client = new Client(server.target, options);
    await client.chat("x", call);
    return Math.ceil(server.secondsLeft);
  };
  assert.equal(await deadline({}), 600);
  assert.equal(await deadline({ timeoutMs: 30_000 }), 30);
  assert.equal(await deadline({}, { timeoutMs: 20_000 }), 20);
  assert.equal(await deadline({ timeoutMs: Number.POSITIVE_INFINITY }), Number.POSITIVE_INFINITY);
  assert.equal(await deadline({}, { timeoutMs: Number.POSITIVE_INFINITY }), Number.POSITIVE_INFINITY);
  process.env.DRAFTWOOD_TIMEOUT = "40";
  assert.equal(await deadline({}), 40);
  process.env.DRAFTWOOD_TIMEOUT = "inf";
  assert.equal(await deadline({}), Number.POSITIVE_INFINITY);
  process.env.DRAFTWOOD_TIMEOUT = "0.2";
  server.script = [silent];
  await assert.rejects(deadline({}), { name: "DeadlineError" });
});

test("a call has headers of its own", async () => {
  using client = new Client(server.target, { metadata: { "x-a": "client", "x-b": "client" }, token: "t" });
  await client.complete("x", { metadata: { "X-B": "call" } });
  assert.deepEqual([server.metadata.get("x-a"), server.metadata.get("x-b")], [["client"], ["call"]]);
  await client.modelInfo({ metadata: { authorization: "Basic own" } });
  assert.deepEqual(server.metadata.get("authorization"), ["Basic own"]);
});
