// What the openai package of node makes of the server: the first argument is its address. Asserts, and prints nothing.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { CALL, CITY_TOOL, say } from "./script.mjs";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const ask = (text, more = {}) =>
  client.chat.completions.create({ model: "demo", messages: [{ role: "user", content: text }], ...more });

const whole = await ask(say("Good morning."));
assert.equal(whole.choices[0].message.content, "Good morning.");
let text = "", pieces = 0;
for await (const chunk of await ask(say("Good morning."), { stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  pieces += 1;
}
assert.equal(text, "Good morning.");
assert.ok(pieces > 2);

const called = await ask(say(CALL), { tools: [CITY_TOOL] });
const [made] = called.choices[0].message.tool_calls;
assert.equal(made.function.name, "city");
assert.deepEqual(JSON.parse(made.function.arguments), { name: "Oslo" });

const runner = client.chat.completions.runTools({
  model: "demo",
  stream: true,
  messages: [{ role: "user", content: say(CALL) }],
  tools: [
    {
      type: "function",
      function: {
        ...CITY_TOOL.function,
        parse: JSON.parse,
        function: ({ name }) => say(`${name} has 700,000 people.`),
      },
    },
  ],
});
assert.equal(await runner.finalContent(), "Oslo has 700,000 people.");

const stream = client.responses.stream({ model: "demo", input: say("Good morning.") });
const response = await stream.finalResponse();
assert.equal(response.output_text, "Good morning.");

await assert.rejects(ask("too much ".repeat(3000)), { status: 400, code: "context_length_exceeded" });
await assert.rejects(client.models.retrieve("another"), { status: 404 });

// A reader that leaves ends its request: the server takes the next.
const left = await ask(say("word ".repeat(200)), { stream: true });
for await (const _ of left) break;
assert.equal((await ask(say("Still here."))).choices[0].message.content, "Still here.");
