// Clients in JavaScript against a gateway: node clients.js URL MODEL. Prints a JSON object for each case.
"use strict";
const assert = require("node:assert/strict");

const baseURL = `${process.argv[2]}/v1`, name = process.argv[3], prompt = "Where is my parcel?";
const number = { type: "object", properties: { number: { type: "integer", minimum: 10, maximum: 99 } }, required: ["number"], additionalProperties: false };
const checked = (value) => assert.ok(value.number >= 10 && value.number <= 99);

async function row(client, label, run) {
  let why = "";
  try { await run(); } catch (error) { why = String(error).slice(0, 300); }
  console.log(JSON.stringify({ client, case: label, ok: !why, why }));
}

async function official() {
  const OpenAI = require("openai");
  const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
  const stream = client.responses.stream({ model: name, input: prompt, max_output_tokens: 20 });
  const whole = await client.responses.create({ model: name, input: prompt, max_output_tokens: 20 });
  assert.equal((await stream.finalResponse()).output_text, whole.output_text);
  const [call] = (await client.responses.create({ model: name, input: prompt, max_output_tokens: 100, tools: [{ type: "function", name: "find", parameters: number, strict: true }], tool_choice: { type: "function", name: "find" } })).output;
  checked(JSON.parse(call.arguments));
}

function vercel(model) {
  const { generateObject, generateText, jsonSchema, streamText, tool } = require("ai");
  const options = { model, prompt, maxOutputTokens: 100, temperature: 0 };
  return {
    text: async () => {
      const { text } = await generateText(options), streamed = streamText(options);
      let joined = "";
      for await (const piece of streamed.textStream) joined += piece;
      assert.equal(joined, text);
      assert.ok((await streamed.usage).outputTokens > 0);
    },
    tool: async () => {
      const find = tool({ description: "Finds.", inputSchema: jsonSchema(number) });
      const { toolCalls } = await generateText({ ...options, tools: { find }, toolChoice: { type: "tool", toolName: "find" } });
      checked(toolCalls[0].input);
    },
    object: async () => checked((await generateObject({ ...options, schema: jsonSchema(number) })).object),
  };
}

async function main() {
  await row("openai (Node)", "responses", official);
  const models = {
    responses: () => require("@ai-sdk/openai").createOpenAI({ baseURL, apiKey: "unused" }).responses(name),
    chat: () => require("@ai-sdk/openai").createOpenAI({ baseURL, apiKey: "unused" }).chat(name),
    compatible: () => require("@ai-sdk/openai-compatible").createOpenAICompatible({ name: "draftwood", baseURL, includeUsage: true, supportsStructuredOutputs: true })(name),
  };
  for (const [api, made] of Object.entries(models)) {
    for (const label of ["text", "tool", "object"]) await row("ai (Vercel)", `${api}, ${label}`, () => vercel(made())[label]());
  }
}

main();
