// openai-node against a server: `node openai_client.mjs FOLDER_OF_OPENAI BASE_URL MODEL` prints what it got as JSON.
import { pathToFileURL } from "node:url";

const [folder, baseURL, model] = process.argv.slice(2);
const { default: OpenAI } = await import(pathToFileURL(`${folder}/index.mjs`));
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "say:Hällo 🙂" }];
const found = {};

const whole = await client.chat.completions.create({ model, messages, logprobs: true });
found.whole = whole.choices[0].message.content;
found.tokens = whole.choices[0].logprobs.content.length;

found.streamed = "";
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ model, messages, ...options })) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
  found.usage = chunk.usage?.total_tokens ?? found.usage;
}
found.helper = await client.chat.completions.stream({ model, messages }).finalContent();
found.completion = (await client.completions.create({ model, prompt: "say:abc" })).choices[0].text;
found.response = (await client.responses.create({ model, input: "say:ok" })).output_text;
const events = [];
for await (const event of await client.responses.create({ model, input: "say:ok", stream: true })) events.push(event.type);
found.events = [events[0], events.at(-1)];
found.vector = (await client.embeddings.create({ model, input: ["abc"] })).data[0].embedding;
found.models = (await client.models.list()).data.map((one) => one.id);
try {
  await client.chat.completions.create({ model: "other", messages });
} catch (error) {
  found.error = [error.constructor.name, error.status, error.code, error.param];
}
const stopped = new AbortController();
const endless = await client.chat.completions.create(
  { model, messages: [{ role: "user", content: "count" }], stream: true }, { signal: stopped.signal });
for await (const chunk of endless) {
  if (chunk.choices[0].delta.content) break;
}
stopped.abort();
console.log(JSON.stringify(found));
