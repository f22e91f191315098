// The official openai package for Node: whole, streamed, helpers, responses, errors.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France? Answer in one sentence." }];
const same = { model: "starter", messages, max_tokens: 40, temperature: 0 };

const whole = await client.chat.completions.create(same);
assert.match(whole.choices[0].message.content, /Paris/);
assert.ok(whole.usage.total_tokens > 0);

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...same, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.ok(usage.completion_tokens > 0);

const helper = client.chat.completions.stream(same);
assert.match((await helper.finalChatCompletion()).choices[0].message.content, /Paris/);

const response = await client.responses.create({
  model: "starter", input: messages[0].content, max_output_tokens: 40, temperature: 0,
});
assert.match(response.output_text, /Paris/);
const kinds = [];
const events = await client.responses.create({
  model: "starter", input: "hello", max_output_tokens: 8, stream: true,
});
for await (const event of events) kinds.push(event.type);
assert.equal(kinds[0], "response.created");
assert.match(kinds.at(-1), /response\.(completed|incomplete)/);

await assert.rejects(
  client.chat.completions.create({ ...same, model: "nothing" }),
  (error) => error.status === 404 && error.code === "model_not_found",
);
await assert.rejects(
  client.chat.completions.create({ ...same, temperature: 99 }),
  (error) => error.status === 400 && error.param === "temperature",
);
assert.equal((await client.models.list()).data[0].id, "starter");
