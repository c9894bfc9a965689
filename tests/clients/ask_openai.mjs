// OpenAI's own client for Node, from npm: a chat, a stream, usage and an error.
import { createRequire } from "node:module";

const [url, model, folder] = process.argv.slice(2);
const OpenAI = createRequire(`${folder}/`)("openai");
const messages = [{ role: "system", content: "The kettle holds 1.2 litres. ".repeat(12) }, { role: "user", content: "How much?" }];
const client = new OpenAI({ baseURL: url, apiKey: "none" });
const options = { model, messages, max_completion_tokens: 6, temperature: 0 };
const whole = await client.chat.completions.create(options);
let said = "", cached = 0;
for await (const chunk of await client.chat.completions.create({ ...options, stream: true, stream_options: { include_usage: true } })) {
  said += chunk.choices[0]?.delta?.content ?? "";
  cached = chunk.usage?.prompt_tokens_details?.cached_tokens ?? cached;
}
if (said !== whole.choices[0].message.content) throw new Error(`expected ${whole.choices[0].message.content}, got ${said}`);
if (!(cached > 64)) throw new Error(`expected cached tokens, got ${cached}`);
try {
  await client.chat.completions.create({ ...options, max_completion_tokens: 1e6 });
  throw new Error("expected an error");
} catch (error) {
  if (error.code !== "context_length_exceeded") throw error;
}
