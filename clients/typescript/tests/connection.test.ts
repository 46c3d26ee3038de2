/** Retries, several servers, credentials and TLS. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterEach, beforeEach, test } from "node:test";
import { ServerCredentials, status } from "@grpc/grpc-js";
import { ArgumentError, Client, NO_RETRY, UnavailableError } from "draftwood-client";
import { answers, FakeServer, fails, full } from "./fake-server.js";

let servers: FakeServer[];

beforeEach(async () => {
  servers = [await FakeServer.start(), await FakeServer.start()];
});

afterEach(() => {
  for (const server of servers) {
    server.stop();
  }
});

function first(): FakeServer {
  assert.ok(servers[0]);
  return servers[0];
}

const counts = () => servers.map((server) => server.requests.length);
const both = () => `ipv4:${servers.map((server) => server.target).join(",")}`;

test("a full queue is tried again after the server's delay, with the same id", async () => {
  const server = first();
  server.script = [full("10"), full("10"), answers("ok")];
  using client = new Client(server.target);
  assert.equal((await client.generate("x")).text, "ok");
  assert.equal(server.requests.length, 3);
  assert.equal(new Set(server.requests.map((one) => one.requestId)).size, 1);
});

test("retries end: by policy, by the server, after the first event", async () => {
  const server = first();
  server.script = [full("10")];
  const cases = [
    { retry: {}, script: full("10"), attempts: 4 },
    { retry: { maxAttempts: 2 }, script: full("10"), attempts: 2 },
    { retry: NO_RETRY, script: full("10"), attempts: 1 },
    { retry: {}, script: full("-1"), attempts: 1 },
  ];
  for (const { retry, script, attempts } of cases) {
    server.requests.length = 0;
    server.script = [script];
    using client = new Client(server.target, { retry });
    await assert.rejects(client.generate("x"), { name: "UnavailableError", reason: "QUEUE_FULL" });
    assert.equal(server.requests.length, attempts);
  }
  server.requests.length = 0;
  server.script = [fails({ code: status.UNAVAILABLE, message: "it ends", after: ["a"] }), answers("never")];
  using client = new Client(server.target);
  await assert.rejects(client.generate("x"), UnavailableError);
  assert.equal(server.requests.length, 1);
});

test("requests go in turn to the servers that are ready", async () => {
  using client = new Client(both());
  for (let i = 0; i < 2 || counts().includes(0); i += 1) {
    assert.ok(i < 200, `one server got nothing: ${counts()}`);
    await client.generate("x");
  }
  first().setReady(false);
  for (let before = -1, deadline = Date.now() + 20_000; before !== first().requests.length; ) {
    assert.ok(Date.now() < deadline, "a server that is not ready gets requests");
    before = first().requests.length;
    await Promise.all(Array.from({ length: 8 }, () => client.generate("x")));
  }
  first().setReady(true);
  for (let before = first().requests.length, deadline = Date.now() + 20_000; before === first().requests.length; ) {
    assert.ok(Date.now() < deadline, "a server that is ready again gets no requests");
    await client.generate("x");
  }
});

test("the first requests wait until a server has told that it is ready", async () => {
  first().setReady(false);
  using client = new Client(both(), { retry: NO_RETRY });
  await Promise.all(Array.from({ length: 16 }, () => client.generate("x")));
  assert.deepEqual(counts(), [0, 16]);
});

test("no server is ready, then one is", async () => {
  for (const server of servers) {
    server.setReady(false);
  }
  using client = new Client(both(), { retry: NO_RETRY });
  await assert.rejects(client.generate("x"), { message: `no server of ${both()} is ready` });
  assert.deepEqual(counts(), [0, 0]);
  setTimeout(() => first().setReady(true), 50);
  await client.waitUntilReady({ timeoutMs: 20_000 });
  await client.generate("x");
  assert.deepEqual(counts(), [1, 0]);
});

test("a server that ends is left out, and a target of names works", async () => {
  using several = new Client(both());
  await several.generate("x");
  first().stop();
  for (let i = 0; i < 8; i += 1) {
    await several.generate("x");
  }
  using named = new Client(`dns:///localhost:${servers[1]?.port}`);
  await named.generate("x");
});

test("credentials and headers of each request", async () => {
  const server = first();
  let number = 0;
  using client = new Client(server.target, { token: async () => `t${++number}` });
  await client.tokenize("a");
  await client.generate("b");
  using keyed = new Client(server.target, { apiKey: "dw_ID_SECRET" });
  await keyed.generate("c");
  using own = new Client(server.target, { metadata: { Authorization: "Bearer mine" } });
  await own.generate("d");
  assert.deepEqual(server.headers.flat(), ["Bearer t1", "Bearer t2", "Bearer dw_ID_SECRET", "Bearer mine"]);
  using broken = new Client(server.target, { token: () => "secret\n" });
  await assert.rejects(broken.generate("x"), (error) => {
    assert.ok(error instanceof ArgumentError);
    assert.ok(!error.message.includes("secret"));
    return true;
  });
});

test("a credential is not sent in clear text to another machine", () => {
  for (const target of [
    "service:50051",
    "dns:///10.0.0.1:1",
    "ipv4:127.0.0.1:1,10.0.0.1:1",
    "dns://10.0.0.1/localhost:1",
  ]) {
    assert.throws(
      () => new Client(target, { apiKey: "k" }),
      /^ArgumentError: apiKey: would be sent to .* in clear text/,
    );
    assert.throws(() => new Client(target, { metadata: { authorization: "k" } }), /metadata: would be sent/);
    new Client(target, { apiKey: "k", tls: true }).close();
    new Client(target, { apiKey: "k", plaintextCredentials: true }).close();
  }
  for (const local of ["127.9.9.9:1", "[::1]:50051", "unix:/run/x", "dns:localhost:1", "ipv6:[::1]:1"]) {
    new Client(local, { apiKey: "k" }).close();
  }
  assert.throws(
    () => new Client("x:1", { apiKey: "a", token: "b", tls: true }),
    /token: cannot be combined with apiKey/,
  );
});

test("a target names its port", () => {
  for (const target of ["somehost", "::1", "dns:///somehost", "ipv4:10.0.0.7", "somehost:65536", "somehost:https"]) {
    assert.throws(() => new Client(target), /^ArgumentError: target: ".*" has no valid port; write it as host:port/);
  }
});

test("TLS, with another name on the certificate", async () => {
  const folder = mkdtempSync(join(tmpdir(), "draftwood-"));
  try {
    const [key, certificate] = [join(folder, "key"), join(folder, "certificate")];
    const subject = ["-subj", "/CN=draftwood", "-addext", "subjectAltName=DNS:draftwood.test"];
    const how = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"];
    execFileSync("openssl", [...how, "-keyout", key, "-out", certificate, ...subject], { stdio: "ignore" });
    const root = readFileSync(certificate);
    const pair = { private_key: readFileSync(key), cert_chain: root };
    const server = await FakeServer.start(ServerCredentials.createSsl(null, [pair]));
    servers.push(server);
    const tls = { rootCertificates: root, serverName: "draftwood.test" };
    using client = new Client(`dns:///${server.target}`, { tls, apiKey: "k" });
    assert.equal((await client.generate("x", { timeoutMs: 20_000 })).text, "It is here.");
    using stranger = new Client(`localhost:${server.port}`, { tls: true, retry: NO_RETRY });
    await assert.rejects(stranger.generate("x"), UnavailableError);
  } finally {
    rmSync(folder, { recursive: true });
  }
});
