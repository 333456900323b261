// What the clients ask of the scripted server (scripted_core.py).
export const CITY_TOOL = {
  type: "function",
  function: {
    name: "city",
    description: "Looks a city up.",
    parameters: {
      type: "object",
      properties: { name: { type: "string" } },
      required: ["name"],
      additionalProperties: false,
    },
  },
};
export const CALL = '<tool_call>\n{"name": "city", "arguments": {"name": "Oslo"}}\n</tool_call>';
// A prompt that is answered with `text`.
export const say = (text) => "SAY:" + JSON.stringify({ say: text });
