"""An agent with a loop and a zoom tool of its own, which speaks OpenAI's chat API."""

import base64
import io
import json

ZOOM = {
    "type": "function",
    "function": {
        "name": "zoom_in",
        "description": "Show a region of the picture at its full resolution.",
        "parameters": {
            "type": "object",
            "properties": {
                "bbox_2d": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "minItems": 4,
                    "maxItems": 4,
                    "description": "left, top, right, bottom in thousandths of the picture",
                },
                "target": {"type": "string"},
            },
            "required": ["bbox_2d"],
        },
    },
}


async def run(question, client):
    """Return nothing: the run's own rewards score the answer."""
    messages = [{"role": "user", "content": question.content}]
    for turn in range(1, 5):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[ZOOM])
        message = reply.choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        for call in message.tool_calls or ():
            region = json.loads(call.function.arguments)["bbox_2d"]
            content = look(question.image(), region, f"obs{turn} = zoom_in(img0)")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        if not message.tool_calls:
            return


def look(picture, region, text):
    """The crop, or what is wrong with the region, as parts of a message."""
    left, top, right, bottom = (
        round(v * side / 1000) for v, side in zip(region, picture.size * 2, strict=True)
    )
    if not (0 <= left < right <= picture.width and 0 <= top < bottom <= picture.height):
        return "error bad_box: the region is empty or outside of the picture"
    file = io.BytesIO()
    picture.crop((left, top, right, bottom)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
