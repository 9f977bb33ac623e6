"""An agent of two attempts. It knows nothing of drumroll: the client could be anybody's."""

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam


async def solve(client: AsyncOpenAI, prompt: str, answer: str) -> float:
    """Ask; ask once more if the answer is wrong. Returns the reward."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": prompt}]
    for reward in (1.0, 0.3):
        reply = await client.chat.completions.create(model="any", messages=messages)
        text = reply.choices[0].message.content or ""
        if text.strip() == answer:
            return reward
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": prompt})
    return 0.0
