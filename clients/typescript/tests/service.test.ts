/** A running service with the bundled model, at DRAFTWOOD_TARGET; `make test-system` starts one. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { AdminClient, Client, ServingState } from "draftwood-client";

const target = process.env.DRAFTWOOD_TARGET;
const skip = target === undefined && "DRAFTWOOD_TARGET names no service";

test("answers: drafted as plain, seeded samples, formats, stops, errors", { skip }, async () => {
  const client = new Client(target, { tenant: "typescript", timeoutMs: 60_000 });
  const { model, strategies } = await client.waitUntilReady();
  assert.ok(model === "draftwood-demo" && strategies.includes("trie"));
  const ask = (options: object) => client.chat("where is my order?", { maxTokens: 60, ...options });
  const plain = await ask({ drafting: false });
  await ask({ strategy: "trie" });
  const drafted = await ask({ strategy: "trie", tokenDetails: true });
  assert.deepEqual([drafted.text, drafted.tokenIds], [plain.text, plain.tokenIds]);
  assert.ok(drafted.drafting.meanAcceptanceLength > 2);
  assert.equal(drafted.details.filter((token) => token.drafted).length, Number(drafted.drafting.acceptedTokens));
  const seed = 2n ** 63n + 1n;
  const bytes = drafted.details.flatMap((token) => (token.special ? [] : [...token.bytes]));
  assert.equal(Buffer.from(bytes).toString(), plain.text);
  assert.deepEqual(
    drafted.details.map(({ tokenId }) => tokenId),
    plain.tokenIds,
  );
  const streamed = await client.streamChat("where is my order?", { maxTokens: 60 }).completion();
  assert.deepEqual([streamed.parts, streamed.tokenIds], [plain.parts, plain.tokenIds]);
  assert.deepEqual([streamed.finishReason, plain.finishReason], ["length", "length"]);
  assert.equal((await ask({ maxTokens: 1 })).finishReason, "length");
  const { samples, usage } = await ask({ temperature: 1, seed, n: 3 });
  const tokens = samples.map((sample) => sample.usage.completionTokens);
  assert.deepEqual(
    tokens,
    samples.map(({ tokenIds }) => tokenIds.length),
  );
  assert.equal(
    usage.completionTokens,
    tokens.reduce((sum, count) => sum + count),
  );
  assert.equal(samples[2]?.seed, seed + 2n);
  assert.equal((await ask({ temperature: 1, seed: seed + 2n })).text, samples[2]?.text);
  assert.match((await client.complete("The number is ", { regex: "[0-9]{4}" })).text, /^[0-9]{4}$/);
  assert.equal((await ask({ stop: " " })).matchedStop, " ");
  const { tokenIds } = await client.tokenize("where is my order?");
  assert.equal(await client.detokenize(tokenIds), "where is my order?");
  for (let i = 0; i < 20; i += 1) for await (const _ of client.streamComplete(tokenIds, { ignoreEos: true })) break;
  const violated = { name: "InvalidRequestError", message: /^sampling\.temperature: -1/ };
  await assert.rejects(ask({ temperature: -1 }), violated);
  await assert.rejects(ask({ model: "other" }), { name: "NotFoundError" });
  client.close();
});

test("operators change tenants and memories, and read the status", { skip }, async () => {
  const admin = new AdminClient(target);
  const tenant = "typescript-memory";
  const { name, etag } = await admin.tenants.createTenant({ tenantId: tenant, tenant: { weight: 2 } });
  const drafting = { strategy: "trie", options: { branch_length: 8 } };
  const changed = { tenant: { name, etag, drafting }, updateMask: { paths: ["drafting"] } };
  assert.deepEqual((await admin.tenants.updateTenant(changed)).drafting?.options, drafting.options);
  for await (const { status } of admin.status.watchStatus({})) if (status?.state === ServingState.SERVING) break;
  const endless = (async function* () {
    for (;;) yield { tenant, texts: ["Your parcel is at our depot."] };
  })();
  for await (const { texts } of admin.memory.warmMemory(endless)) if (texts === 3n) break;
  assert.equal((await endless.next()).done, true);
  let exported = 0;
  for await (const { records } of admin.memory.exportMemory({ tenant })) exported += records.length;
  assert.ok(exported > 0);
  assert.ok((await admin.memory.purgeMemory({ tenant })).tokens > 0n);
  await admin.tenants.deleteTenant({ name });
  await assert.rejects(admin.tenants.getTenant({ name }), { name: "NotFoundError" });
  admin.close();
});
