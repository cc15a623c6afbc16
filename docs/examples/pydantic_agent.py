"""An agent of pydantic-ai with a tool that returns a picture; the framework owns the loop."""

import io

from pydantic_ai import Agent, BinaryContent, RunContext, ToolReturn
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

agent = Agent(deps_type=object)


@agent.tool
def zoom_in(context: RunContext, bbox_2d: list[int], target: str = "img0") -> ToolReturn:
    """Show a region of the picture; bbox_2d: left, top, right, bottom in thousandths."""
    picture = context.deps.image()
    left, top, right, bottom = (
        round(v * side / 1000) for v, side in zip(bbox_2d, picture.size * 2, strict=True)
    )
    file = io.BytesIO()
    picture.crop((left, top, max(right, left + 1), max(bottom, top + 1))).save(file, "PNG")
    crop = BinaryContent(file.getvalue(), media_type="image/png")
    return ToolReturn("the region follows", content=[crop])


async def run(question, client):
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
    pictures = [BinaryContent.from_data_uri(url) for url in question.pictures.values()]
    answer = await agent.run([*pictures, question.text], model=model, deps=question)
    return float(answer.output.strip() in (question.answers or []))
