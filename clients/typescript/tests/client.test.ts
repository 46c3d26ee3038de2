/** Requests, streams, errors, retries, deadlines, credentials and TLS, against a scripted server. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { once } from "node:events";
import { readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterEach, beforeEach, test } from "node:test";
import { setTimeout } from "node:timers/promises";
import { toJson } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import * as draftwood from "draftwood-client";
import { type Answer, FakeServer, full, invalid, overQuota } from "./fake-server.js";

const name = "ArgumentError";
const NONE = Number.POSITIVE_INFINITY;
let server: FakeServer;
let client: draftwood.Client;

beforeEach(async () => {
  for (const name of Object.keys(process.env)) if (name.startsWith("DRAFTWOOD_")) delete process.env[name];
  server = await FakeServer.start();
  process.env.DRAFTWOOD_TARGET = server.target;
  client = new draftwood.Client(server.target, { tenant: "acme", maxAttempts: 1 });
});

afterEach(() => {
  client.close();
  server.stop();
});

/** One answer, by a client of these options. */
async function chat(options: draftwood.ClientOptions = {}, call: draftwood.CallOptions = {}, target?: string) {
  const other = new draftwood.Client(target, options);
  return other.chat("x", call).finally(() => other.close());
}

/** The same as a stream. */
async function streamed(options: draftwood.ClientOptions = {}) {
  const other = new draftwood.Client(undefined, options);
  return other
    .streamChat("x")
    .completion()
    .finally(() => other.close());
}

type Ask = (options: draftwood.ClientOptions) => Promise<draftwood.Completion>;

async function read(stream: AsyncIterable<unknown>, each: () => void = () => {}): Promise<void> {
  for await (const _ of stream) each();
}

test("options are fields of the request; the answer is that of the stream", async () => {
  const sampling = { seed: 2n ** 64n - 1n, temperature: 0.5, topK: undefined, logitBias: { 7: -1 } };
  const stop = { maxTokens: 0, stop: "\n", stopTokenIds: [2] };
  const drafting = { drafting: true, maxDraftNodes: 8, learn: false };
  const others = { tokenDetails: true, rawText: false, session: "s", priority: -1, jsonSchema: { type: "object" } };
  const tools = [{ name: "track", parameters: { type: "object" } }];
  const of = { role: "assistant", reasoning: "Track 7.", toolCalls: [{ name: "track", arguments: '{"order":7}' }] };
  const result = { role: "tool", toolCallId: "1", toolName: "track" };
  const messages = [
    { ...of, content: "I look." },
    { ...result, content: [{ text: "in " }, { text: "Bremen" }] },
  ];
  const options = { ...sampling, ...stop, ...drafting, ...others, tools };
  const stream = client.streamChat(messages, options);
  const texts: string[] = [];
  for await (const { text } of stream) texts.push(text + stream.started?.model);
  assert.deepEqual(texts, ["It isfake", " here.fake", "fake"]);
  const { text, tokenIds, seed, requestId, finishReason } = await stream.completion();
  assert.deepEqual([text, tokenIds, seed], ["It is here.", [5, 6], sampling.seed]);
  assert.equal(finishReason, "stop");
  assert.match(requestId, /^[0-9a-f]{32}$/);
  await client.chat(messages, { ...options, requestId });
  const [streamed, whole] = server.requests.map((request) => toJson(draftwood.GenerateRequestSchema, request));
  assert.deepEqual(streamed, whole);
  assert.deepEqual(whole, {
    ...{ requestId, tenant: "acme", session: "s", priority: -1 },
    chat: {
      messages: [{ ...of, content: [{ text: "I look." }] }, messages[1]],
      tools: [{ name: "track", parameters: '{"type":"object"}' }],
    },
    sampling: { seed: `${sampling.seed}`, temperature: 0.5, logitBias: { 7: -1 } },
    stop: { maxTokens: 0, strings: ["\n"], tokenIds: [2] },
    drafting: { enabled: true, maxNodes: 8, learn: false },
    output: { tokenDetails: true, rawText: false },
    format: { jsonSchema: '{"type":"object"}' },
  });
});

test("text, reasoning and calls of each sample, as they come and whole", async () => {
  const calls = [
    { id: "a", name: "track", arguments: '{"order":7}' },
    { id: "b", name: "track", arguments: "{}" },
  ];
  server.script = [{ reasoning: ["Two ", "calls."], texts: ["I ", "look."], calls }];
  const options = { n: 2, seed: 5, requestId: "r" };
  const whole = await client.chat("x", options);
  const plain = whole.toolCalls.map(({ id, name, arguments: written }) => ({ id, name, arguments: written }));
  assert.deepEqual([whole.reasoning, whole.text, plain], ["Two calls.", "I look.", calls]);
  assert.deepEqual(
    whole.parts.map((part) => part.case),
    ["reasoning", "text", "toolCall", "toolCall"],
  );
  assert.deepEqual(whole.tokenIds, [4, 6, 2, 5, 100, 100, 100, 100]);
  assert.deepEqual(
    whole.samples[1]?.details.map(({ tokenId }) => tokenId),
    whole.tokenIds.map((id) => id + 1),
  );
  assert.deepEqual([whole.finishReason, whole.matchedStop, whole.usage.completionTokens], ["tool_calls", "\n", 4]);
  assert.deepEqual(
    whole.samples.map(({ seed, usage }) => [seed, usage.completionTokens, usage.reasoningTokens]),
    [
      [5n, 2, 0],
      [6n, 2, 1],
    ],
  );
  assert.deepEqual([whole.started.strategy, whole.drafting.meanAcceptanceLength], ["trie", 1.5]);

  const stream = client.streamChat("x", options);
  const last: draftwood.Delta[] = [];
  const pieces: unknown[] = [];
  for await (const delta of stream) {
    if (delta.sample === 1) last.push(delta);
    for (const { index, id, arguments: written } of delta.sample === 1 ? delta.toolCalls : []) {
      pieces.push([index, id, written]);
    }
  }
  assert.deepEqual(pieces, [
    [0, "a", '{"o'],
    [0, "", 'rder":7}'],
    [1, "b", "{}"],
    [1, "", ""],
  ]);
  assert.equal(last.map(({ reasoning, text }) => reasoning + text).join(""), "Two calls.I look.");
  assert.deepEqual(
    last.map(({ result }) => result?.finishReason),
    [...Array(8).fill(undefined), "tool_calls"],
  );
  assert.deepEqual(await stream.completion(), whole);

  const { toolCalls, reasoning, text } = whole;
  await client.chat([{ role: "assistant", content: text, reasoning, toolCalls }]);
  const { prompt } = server.requests.at(-1) ?? {};
  assert.deepEqual(prompt?.case === "chat" && prompt.value.messages[0]?.toolCalls, toolCalls);
});

test("reasons of the end, also those of newer servers", async () => {
  const reasons = { 1: "stop", 2: "length", 3: "tool_calls", 4: "cancelled", 5: "unknown" };
  for (const [reason, finishReason] of Object.entries(reasons)) {
    server.script = [{ texts: ["a"], reason: Number(reason) }];
    assert.equal((await client.complete("x")).finishReason, finishReason);
    assert.equal((await client.streamComplete("x").completion()).finishReason, finishReason);
  }
});

const REFUSED: [options: object, argument: string, message: RegExp][] = [
  [{ max_tokens: 3 }, "options", /"max_tokens" is unknown/],
  [{ maxTokens: "x" }, "maxTokens", /int32/],
  [{ maxDraftNodes: 1.5 }, "maxDraftNodes", /1\.5/],
  [{ topK: 2 ** 31 }, "topK", /int32/],
  [{ seed: 2n ** 64n }, "seed", /uint64/],
  [{ seed: 2 ** 60 }, "seed", /use a bigint/],
  [{ stop: ["a", 3] }, "stop", /string/],
  [{ logitBias: { x: 1 } }, "logitBias", /x/],
  [{ regex: "a", lark: "b" }, "format", /multiple/],
  [{ tools: [{ name: 3 }] }, "name", /string/],
  [{ timeoutMs: 0 }, "timeoutMs", /must be above 0/],
];

test("what cannot be encoded is refused before anything is sent", async () => {
  for (const [options, argument, message] of REFUSED) {
    assert.throws(() => client.streamChat("x", options), { name, argument, message });
  }
  assert.throws(() => client.streamChat([{ role: "user" }] as never), { name, argument: "messages[0]" });
  assert.throws(() => client.streamChat([{ role: "user", content: ["a"] }] as never), { name, message: /{ text }/ });
  await assert.rejects(client.chat("x", { maxTokens: 1.5 }), { name, argument: "maxTokens" });
  assert.throws(() => client.streamComplete([{ role: "user" }] as never), { name, message: /`chat` answers messages/ });
  assert.throws(() => client.streamComplete("x", { tools: [] }), { name, message: /"tools" is unknown/ });
  await assert.rejects(client.detokenize(["x"] as never), { name, argument: "tokenIds" });
});

test("the request is cancelled on the server by leaving the loop, cancel, a signal and close", async () => {
  type Leave = (stream: draftwood.GenerationStream, controller: AbortController) => unknown;
  const ways: [leave: Leave, cause: unknown][] = [
    [(stream) => stream[Symbol.asyncIterator]().return?.(), undefined],
    [(stream) => stream.cancel("enough"), "enough"],
    [(_, controller) => controller.abort("signal"), "signal"],
    [() => client.close(), new Error("the client is closed")],
  ];
  server.script = [{ texts: ["a"], end: "hangs" }];
  for (const [leave, cause] of ways) {
    const [cancelled, controller] = [once(server.events, "cancelled"), new AbortController()];
    const stream = client.streamChat("x", { signal: controller.signal });
    await stream[Symbol.asyncIterator]().next();
    leave(stream, controller);
    const error = { name: "RequestCancelledError", code: "CANCELLED", requestId: stream.requestId };
    await assert.rejects(stream.completion(), cause ? { ...error, cause } : error);
    await cancelled;
  }
  await assert.rejects(client.modelInfo(), { name: "RequestCancelledError" });
  const [cancelled, controller] = [once(server.events, "cancelled"), new AbortController()];
  const other = new draftwood.Client(server.target);
  const answer = other.chat("x", { signal: controller.signal, requestId: "r" });
  while (server.requests.length === ways.length) await setTimeout(1);
  controller.abort("signal");
  await assert.rejects(answer, { name: "RequestCancelledError", cause: "signal", requestId: "r" });
  await cancelled;
  other.close();
  await assert.rejects(chat({}, { signal: AbortSignal.abort() }), { name: "RequestCancelledError" });
  assert.equal(server.headers.length, ways.length + 1);
});

const [NOT_FOUND, INTERNAL] = [new ConnectError("no", Code.NotFound), new ConnectError("oh", Code.Internal)];
const FAILURES: [texts: string[], end: Answer["end"], error: object][] = [
  [[], invalid, { name: "InvalidRequestError", message: "temperature: -1", code: "INVALID_ARGUMENT" }],
  [[], invalid, { reason: "INVALID_VALUE", requestId: "r-1", retryable: false }],
  [[], invalid, { violations: [{ field: "temperature", description: "low" }] }],
  [[], full("70"), { name: "UnavailableError", reason: "QUEUE_FULL", retryable: true, retryAfterMs: 70 }],
  [[], overQuota, { name: "QuotaExceededError", retryable: true, retryAfterMs: 2500 }],
  [[], overQuota, { violations: [{ field: "acme", description: "" }] }],
  [[], NOT_FOUND, { name: "NotFoundError", message: /^127.0.0.1:\d+: no$/ }],
  [[], new ConnectError("", Code.Aborted), { name: "StatusError", message: /: ABORTED$/ }],
  [["a"], INTERNAL, { name: "InternalError", message: /: oh$/ }],
  [["a"], "without Finished", { name: "InternalError", message: /ended .* without Finished/ }],
];

test("errors have the type of their status and the details of the server", async () => {
  for (const [texts, end = "hangs", error] of FAILURES) {
    server.script = [{ texts, end }];
    const stream = client.streamChat("x");
    await assert.rejects(read(stream), error);
    await assert.rejects(stream.completion(), error);
    if (end !== "without Finished") await assert.rejects(client.chat("x"), error);
  }
  await assert.rejects(client.chat("x", { requestId: "r" }), {
    ...{ name: "InternalError", message: /without Started$/, code: "INTERNAL", requestId: "r" },
  });
});

test("a server that loads its model, and services for operators", async () => {
  server.unavailable = 2;
  assert.equal((await client.waitUntilReady()).parameters, 6_000_000n);
  server.unavailable = 1000;
  await assert.rejects(client.waitUntilReady({ timeoutMs: 300 }), { message: /: the model is loading$/ });
  server.unavailable = 1;
  const admin = new draftwood.AdminClient(server.target);
  const asking = () => admin.tenants.getTenant({ name: "tenants/a" });
  await assert.rejects(asking(), { name: "UnavailableError" }); // which is not retried
  assert.equal((await asking()).etag, "1");
  const failing = async function* () {
    yield { tenant: "a", texts: ["x"] };
    throw new TypeError("no more files");
  };
  await assert.rejects(read(admin.memory.warmMemory(failing())), new TypeError("no more files"));
  admin.close();
});

test("UNAVAILABLE, and what the server cancels, is retried with the same id, up to a limit, the deadline or the first event", async () => {
  const unavailable = new ConnectError("no delay", Code.Unavailable);
  const cases: [script: Answer[], options: draftwood.ClientOptions, attempts: number, text?: string][] = [
    [[{ end: full("10") }, { end: unavailable }, { texts: ["ok"] }], {}, 3, "ok"],
    [[{ end: new ConnectError("closing", Code.Canceled) }, { texts: ["ok"] }], {}, 2, "ok"],
    [[{ end: full("10") }], {}, 4],
    [[{ end: full("10") }], { maxAttempts: 2 }, 2],
    [[{ end: full("-1") }], {}, 1],
    [[{ end: full("60000") }], { timeoutMs: 5000 }, 1],
  ];
  const asked = async (ask: Ask, [script, options, attempts, text]: (typeof cases)[number]) => {
    server.requests = [];
    server.script = script;
    if (text) assert.equal((await ask(options)).text, text);
    else await assert.rejects(ask(options), { name: "UnavailableError" });
    assert.equal(server.requests.length, attempts);
    assert.equal(new Set(server.requests.map(({ requestId }) => requestId)).size, 1);
  };
  for (const each of cases) for (const ask of [chat, streamed]) await asked(ask, each);
  await asked(streamed, [[{ texts: ["a"], end: unavailable }], {}, 1]);
});

test("there is a deadline unless it is switched off", async () => {
  const seconds = async (options: draftwood.ClientOptions = {}, call: draftwood.CallOptions = {}) => {
    await chat(options, call);
    return Math.ceil(Number.parseInt(server.headers.at(-1)?.get("grpc-timeout") ?? "0", 10) / 1000);
  };
  const set = [await seconds(), await seconds({ timeoutMs: 30_000 }), await seconds({}, { timeoutMs: 20_000 })];
  assert.deepEqual([...set, await seconds({ timeoutMs: NONE })], [600, 30, 20, 0]);
  process.env.DRAFTWOOD_TIMEOUT = "inf";
  assert.equal(await seconds(), 0);
  process.env.DRAFTWOOD_TIMEOUT = "0.05";
  server.script = [{ end: "hangs" }];
  const cancelled = once(server.events, "cancelled");
  await assert.rejects(chat(), { name: "DeadlineError", message: /: no complete answer within 0.05 s$/ });
  await cancelled;
});

test("credentials and headers, of the environment, the client and the request", async () => {
  let number = 0;
  const token = async () => `t${++number}`;
  await chat({ token, metadata: { "x-a": "client", "x-b": "client" } }, { metadata: { "X-B": "call" } });
  await chat({ token }, { metadata: { authorization: "Basic a" } });
  await chat({ metadata: { Authorization: "Basic b" }, tenant: "other" });
  Object.assign(process.env, { DRAFTWOOD_API_KEY: "dw_ID_SECRET", DRAFTWOOD_TENANT: "acme" });
  await chat();
  await chat({ token: "mine" });
  const sent = (name: string) => server.headers.map((headers) => headers.get(name));
  const credentials = ["Bearer t1", "Basic a", "Basic b", "Bearer dw_ID_SECRET", "Bearer mine"];
  assert.deepEqual(sent("authorization"), credentials);
  assert.deepEqual([sent("x-a")[0], sent("x-b")[0]], ["client", "call"]);
  assert.match(sent("user-agent")[0] ?? "", /^draftwood-typescript\/\d/);
  assert.deepEqual([...new Set(server.requests.map(({ tenant }) => tenant))], ["", "other", "acme"]);
  const refused = (error: Error) => error.name === "ArgumentError" && !error.message.includes("secret");
  await assert.rejects(chat({ token: () => "secret\n" }), refused);
  await assert.rejects(chat({ metadata: { "x-a": "secret\nx" } }), refused);
});

test("a credential is not sent in clear text to another machine; wrong arguments and variables are named", () => {
  const connect = (target: string | undefined, options: object) => new draftwood.Client(target, options).close();
  for (const target of ["service:50051", "10.0.0.1:1", "127.0.0.1.example.org:1"]) {
    assert.throws(() => connect(target, { apiKey: "k" }), { name, message: /^apiKey: would be sent .* in clear text/ });
    for (const allowed of [{ tls: true }, { plaintextCredentials: true }]) connect(target, { apiKey: "k", ...allowed });
  }
  for (const target of ["127.9.9.9:1", "[::1]:50051", "localhost:1"]) connect(target, { apiKey: "k" });
  for (const target of ["somehost", "::1", "dns:///a:1", "http://a:1", "somehost:65536", "somehost:https"]) {
    assert.throws(() => connect(target, {}), { name, argument: "target" });
  }
  const wrong = { maxAttempts: 6, timeoutMs: -1, apiKey: "two words", tls: { privateKey: Buffer.from("k") } };
  for (const [argument, value] of Object.entries(wrong)) {
    assert.throws(() => connect("localhost:1", { [argument]: value }), { name, argument });
  }
  const variables = { DRAFTWOOD_TIMEOUT: "soon", DRAFTWOOD_TLS: "maybe", DRAFTWOOD_TLS_CA: "/no/such" };
  for (const [argument, value] of Object.entries(variables)) {
    process.env[argument] = value;
    assert.throws(() => connect(undefined, {}), { name, argument });
    delete process.env[argument];
  }
  Object.assign(process.env, { DRAFTWOOD_API_KEY: "secret", DRAFTWOOD_TOKEN: "another" });
  assert.throws(() => connect(undefined, {}), { name, argument: "DRAFTWOOD_TOKEN" });
});

test("TLS with certificates on both sides, by options and by the environment", async () => {
  const path = join(tmpdir(), `draftwood-${process.pid}.pem`); // key and certificate
  const subject = ["-subj", "/CN=draftwood", "-addext", "subjectAltName=DNS:draftwood.test"];
  const key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", path, "-out", path];
  execFileSync("openssl", ["req", "-x509", "-days", "2", ...key, ...subject], { stdio: "ignore" });
  const pem = readFileSync(path);
  const secure = await FakeServer.start({ key: pem, cert: pem, ca: pem, requestCert: true, rejectUnauthorized: true });
  const refused = (tls: draftwood.TlsConfig | boolean, message: RegExp, target = secure.target) =>
    assert.rejects(chat({ maxAttempts: 1, tls }, {}, target), { name: "UnavailableError", message });
  try {
    const trusted = { rootCertificates: pem, serverName: "draftwood.test" };
    const tls = { ...trusted, certificateChain: pem, privateKey: pem };
    assert.equal((await chat({ tls, apiKey: "k" }, {}, secure.target)).text, "It is here.");
    await refused(trusted, /^cannot reach .*certificate/);
    await refused(true, /^cannot reach .*self-signed certificate/);
    await refused(false, /^cannot reach .* if the server requires TLS/);
    await refused(true, /what listens there does not use TLS/, server.target);
    Object.assign(process.env, { DRAFTWOOD_CLIENT_CERT: path, DRAFTWOOD_CLIENT_KEY: path, DRAFTWOOD_TLS_CA: path });
    process.env.DRAFTWOOD_TLS_SERVER_NAME = "draftwood.test";
    assert.equal((await chat({}, {}, secure.target)).text, "It is here.");
  } finally {
    secure.stop();
    rmSync(path);
  }
});

test("a server that goes away, or is not there", async () => {
  server.script = [{ texts: ["a"], end: "hangs" }];
  const name = "UnavailableError";
  const reading = read(client.streamChat("x"), () => server.stop());
  await assert.rejects(reading, { name, message: /^cannot reach 127.*the connection was closed/ });
  await assert.rejects(client.chat("x"), { name, message: /^cannot reach 127.*nothing listens there.*ECONNREFUSED/ });
  await assert.rejects(chat({ maxAttempts: 1 }, {}, "no-such.invalid:1"), { name, message: /ENOTFOUND|EAI_AGAIN/ });
});
