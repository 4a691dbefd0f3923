// OpenAI's client for Node.
const { readFileSync } = require("node:fs");
const { deepStrictEqual } = require("node:assert");
const OpenAI = require("openai");

const client = new OpenAI();
const parameters = {
  type: "object",
  properties: { number: { type: "integer" } },
  required: ["number"],
  additionalProperties: false,
};
const schema = { type: "json_schema", json_schema: { name: "answer", schema: parameters, strict: true } };
const tool = { type: "function", function: { name: "answer", parameters } };
const asked = (question) => ({ model: "policy", messages: [{ role: "user", content: question }] });

const features = {
  async chat(question) {
    const answer = await client.chat.completions.create(asked(question));
    return answer.choices[0].message.content;
  },
  async streaming(question) {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...asked(question), stream: true })) {
      text += chunk.choices[0]?.delta.content ?? "";
    }
    return text;
  },
  async streamed_tools(question) {
    const answer = await client.chat.completions.stream({ ...asked(question), tools: [tool] }).finalChatCompletion();
    return JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments);
  },
  async typed(question) {
    const answer = await client.chat.completions.parse({ ...asked(question), response_format: schema });
    return answer.choices[0].message.parsed;
  },
  async typed_by_tool(question) {
    const choice = { type: "function", function: { name: "answer" } };
    const request = { ...asked(question), tools: [tool], tool_choice: choice };
    const answer = await client.chat.completions.create(request);
    return JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments);
  },
  async responses(question) {
    const answer = await client.responses.create({ model: "policy", input: question });
    return answer.output_text;
  },
  async responses_streaming(question) {
    let text = "";
    for await (const event of await client.responses.create({ model: "policy", input: question, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    return text;
  },
};

async function main() {
  const row = JSON.parse(readFileSync(0, "utf8"));
  deepStrictEqual(await features[process.argv[2]](row.input), row.expected);
}

main();
