/** A running service with the bundled model, at DRAFTWOOD_TARGET; `make test` starts one. */

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import {
  AdminClient,
  Client,
  DeadlineError,
  ExperimentState,
  InvalidRequestError,
  MemoryKind,
  type MemoryRecord,
  NotFoundError,
  RequestCancelledError,
  ServingState,
  StatusError,
} from "draftwood-client";

const target = process.env.DRAFTWOOD_TARGET;
const skip = target === undefined && "DRAFTWOOD_TARGET names no service";
const QUESTION = [{ role: "user", content: "where is my order?" }];

let client: Client;

before(() => {
  client = new Client(target, { tenant: "typescript", timeoutMs: 60_000 });
});

after(() => client.close());

test("the second answer of a question is drafted, and is the same", { skip }, async () => {
  const model = await client.waitUntilReady();
  assert.equal(model.model, "draftwood-demo");
  assert.ok(model.strategies.includes("trie") && model.hasChatTemplate && model.parameters > 1_000_000);
  const plain = await client.chat(QUESTION, { maxTokens: 60, drafting: false });
  assert.equal(plain.drafting.strategy, "none");
  await client.chat(QUESTION, { maxTokens: 60, strategy: "trie" });
  const drafted = await client.chat(QUESTION, { maxTokens: 60, strategy: "trie", tokenDetails: true });
  assert.equal(drafted.text, plain.text);
  assert.deepEqual(drafted.tokenIds, plain.tokenIds);
  assert.ok(drafted.drafting.meanAcceptanceLength > 2, `${drafted.drafting.meanAcceptanceLength} tokens a step`);
  assert.equal(drafted.details.filter((one) => one.drafted).length, drafted.drafting.acceptedTokens);
  assert.equal(drafted.tenant, "typescript");
});

test("a stream writes what chat returns", { skip }, async () => {
  const stream = client.streamChat(QUESTION, {
    maxTokens: 30,
    requestId: "r-1",
    strategy: "recycling",
    draftTrees: true,
  });
  let text = "";
  let accepted = 0;
  for await (const delta of stream) {
    text += delta.text;
    for (const { tokens, tokenIds, parents, accepted: path } of delta.draftTrees) {
      assert.ok(tokens.length === tokenIds.length && parents.every((parent, node) => parent >= -1 && parent < node));
      accepted += path.length;
    }
  }
  assert.equal(accepted, (await stream.completion()).drafting.acceptedTokens);
  const completion = await stream.completion();
  assert.equal(text, completion.text);
  assert.equal(completion.requestId, "r-1");
  assert.equal(completion.finishReason, "length");
  assert.equal(completion.usage.completionTokens, 30);
});

test("samples have seeds of 64 bits, each of which gives its sample alone", { skip }, async () => {
  const seed = 2n ** 63n + 1n;
  const options = { temperature: 1, maxTokens: 20 };
  const { samples } = await client.complete("Dear customer,", { ...options, seed, n: 3 });
  assert.deepEqual(
    samples.map((one) => one.seed),
    [seed, seed + 1n, seed + 2n],
  );
  const alone = await client.complete("Dear customer,", { ...options, seed: seed + 2n });
  assert.equal(alone.text, samples[2]?.text);
});

test("formats, stops and log-probabilities", { skip }, async () => {
  const digits = await client.complete("The order number is ", { regex: "[0-9]{4}" });
  assert.match(digits.text, /^[0-9]{4}$/);
  const jsonSchema = {
    type: "object",
    properties: { ok: { type: "boolean" } },
    required: ["ok"],
    additionalProperties: false,
  };
  const json = await client.complete("Is it so? ", { jsonSchema, maxTokens: 60 });
  assert.equal(typeof JSON.parse(json.text).ok, "boolean");
  const stopped = await client.chat(QUESTION, { stop: [" "] });
  assert.deepEqual([stopped.matchedStop, stopped.finishReason], [" ", "stop"]);
  const [detail] = (await client.chat(QUESTION, { maxTokens: 1, topLogprobs: 2 })).details;
  assert.equal(detail?.topLogprobs[0]?.logprob, detail?.logprob);
  assert.equal(detail?.topLogprobs.length, 2);
});

test("tokens there and back", { skip }, async () => {
  const { tokenIds, tokens } = await client.tokenize("where is my order?");
  assert.equal(tokens.length, tokenIds.length);
  assert.equal(await client.detokenize(tokenIds), "where is my order?");
  const continued = await client.complete(tokenIds, { maxTokens: 5 });
  assert.equal(continued.text, (await client.complete("where is my order?", { maxTokens: 5 })).text);
});

test("a request that is left early frees its slot", { skip }, async () => {
  for (let i = 0; i < 20; i += 1) {
    for await (const _ of client.stream(QUESTION, { ignoreEos: true })) {
      break;
    }
  }
  assert.equal((await client.chat(QUESTION, { maxTokens: 3 })).tokenIds.length, 3);
});

test("errors of the service", { skip }, async () => {
  await assert.rejects(client.complete("x", { temperature: -1 }), (error) => {
    assert.ok(error instanceof InvalidRequestError);
    assert.equal(error.violations[0]?.field, "sampling.temperature");
    assert.match(error.message, /^sampling\.temperature: -1/);
    assert.notEqual(error.reason, "");
    return true;
  });
  await assert.rejects(client.complete("x", { model: "other" }), NotFoundError);
});

test("each sample tells how it ends", { skip }, async () => {
  const ends = new Map<number, string>();
  const stream = client.streamComplete("Dear customer,", { temperature: 1, n: 3, seed: 1, maxTokens: 8 });
  for await (const { sample, finished, text } of stream) {
    assert.ok(text === "" || !ends.has(sample));
    if (finished) {
      ends.set(sample, finished.reason);
    }
  }
  const { samples } = await stream.completion();
  assert.deepEqual(
    [0, 1, 2].map((one) => ends.get(one)),
    samples.map((one) => one.finishReason),
  );
});

test("operators read and change what the server holds", { skip }, async () => {
  const admin = new AdminClient(target);
  try {
    const made = await admin.tenants.createTenant({ tenantId: "typescript-1", tenant: { weight: 2 } });
    assert.deepEqual([made.name, made.weight], ["tenants/typescript-1", 2]);
    const changed = await admin.tenants.updateTenant({
      tenant: { name: made.name, etag: made.etag, drafting: { strategy: "trie", options: { branch_length: 8 } } },
      updateMask: { paths: ["drafting"] },
    });
    assert.deepEqual(changed.drafting?.options, { branch_length: 8 });
    await admin.tenants.deleteTenant({ name: made.name });
    await assert.rejects(admin.tenants.getTenant({ name: made.name }), NotFoundError);

    const arms = ["trie", "none"].map((id) => ({ id, drafting: { strategy: id } }));
    const draft = await admin.experiments.createExperiment({ experimentId: "ts", experiment: { arms } });
    assert.equal(draft.state, ExperimentState.DRAFT);
    const report = await admin.experiments.getExperimentReport({ name: draft.name });
    assert.equal(report.findings.length, report.conclusions.length);
    await admin.experiments.deleteExperiment({ name: draft.name });

    const { status } = await admin.status.getStatus({});
    assert.equal(status?.state, ServingState.SERVING);
    for await (const sample of admin.status.watchStatus({ interval: { nanos: 500_000_000 } })) {
      assert.equal(sample.status?.model, status?.model);
      break;
    }
    assert.equal((await admin.audit.getAuditReport({})).model, status?.model);
  } finally {
    admin.close();
  }
});

const TEXTS = ["Your parcel is at our depot.", "It comes within two working days.", "We are sorry for the delay."];

test("operators warm, export, import and purge a memory", { skip }, async () => {
  using admin = new AdminClient(target);
  const tenant = "typescript-memory";
  const answered: bigint[] = [];
  const requests = TEXTS.map((text, index) => ({ tenant: index === 0 ? tenant : "", texts: [text] }));
  for await (const { texts } of admin.memory.warmMemory(requests)) {
    answered.push(texts);
  }
  assert.deepEqual(answered, [1n, 2n, 3n]);

  const exported = await exportOf(admin, tenant);
  assert.deepEqual(
    exported.records.map(({ text, kind }) => [text, kind]),
    TEXTS.map((text) => [text, MemoryKind.CORPUS]),
  );
  const { records, fingerprint } = exported;
  let imported = 0n;
  for await (const progress of admin.memory.importMemory([{ tenant: `${tenant}-2`, fingerprint, records }])) {
    imported = progress.records;
  }
  assert.equal(imported, 3n);
  const found = await admin.memory.getMemoryStatistics({ tenant: `${tenant}-2` });
  assert.deepEqual([found.fingerprint, found.store?.healthy, found.tenants.length], [fingerprint, true, 1]);

  for (const name of [tenant, `${tenant}-2`]) {
    const purged = await admin.memory.purgeMemory({ tenant: name });
    assert.equal(purged.tokens, found.tenants[0]?.tokens);
    assert.deepEqual((await exportOf(admin, name)).records, []);
  }
  assert.deepEqual((await admin.memory.listOrphanedMemories({})).memories, []);
  assert.equal((await admin.memory.purgeOrphanedMemories({})).memories, 0);
  await assert.rejects(exportOf(admin, "typescript-nobody"), NotFoundError);
});

test("a stream of requests that fails, or is left, ends its call and is read no further", { skip }, async () => {
  using admin = new AdminClient(target);
  const tenant = "typescript-left";
  const failing = async function* () {
    yield { tenant, texts: [TEXTS[0] ?? ""] };
    throw new TypeError("no more files");
  };
  await assert.rejects(all(admin.memory.warmMemory(failing())), new TypeError("no more files"));

  const endless = (ended: () => void) =>
    (async function* () {
      try {
        for (;;) {
          yield { tenant, texts: [TEXTS[1] ?? ""] };
        }
      } finally {
        ended();
      }
    })();
  /** Makes the call with an endless stream of requests, and resolves when that was left. */
  const left = async (call: (requests: AsyncIterable<{ tenant: string; texts: string[] }>) => Promise<unknown>) => {
    let ended = () => {};
    const end = new Promise<void>((resolve) => {
      ended = resolve;
    });
    await Promise.all([call(endless(ended)), end]);
  };
  await left(async (requests) => {
    for await (const { texts } of admin.memory.warmMemory(requests)) {
      if (texts === 3n) break;
    }
  });
  const headers = { metadata: { "x-large": "a".repeat(100_000) } };
  await left((requests) => assert.rejects(all(admin.memory.warmMemory(requests, headers)), StatusError));
  await left((requests) => assert.rejects(all(admin.memory.warmMemory(requests, { timeoutMs: 500 })), DeadlineError));
  const signal = AbortSignal.timeout(500);
  await left((requests) => assert.rejects(all(admin.memory.warmMemory(requests, { signal })), RequestCancelledError));
  await admin.memory.purgeMemory({ tenant });
});

async function exportOf(admin: AdminClient, tenant: string): Promise<{ fingerprint: string; records: MemoryRecord[] }> {
  const pages = await all(admin.memory.exportMemory({ tenant }));
  return { fingerprint: pages[0]?.fingerprint ?? "", records: pages.flatMap((page) => page.records) };
}

async function all<Item>(items: AsyncIterable<Item>): Promise<Item[]> {
  const found: Item[] = [];
  for await (const one of items) {
    found.push(one);
  }
  return found;
}
