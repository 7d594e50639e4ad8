"""An agent that talks to the model with Anthropic's client: it asks once more if the answer is wrong.

`rl_sort_anthropic.yaml` trains the model that it talks to.
"""

import anthropic

# Making a client takes longer than an attempt, so all attempts share one.
CLIENT = anthropic.AsyncAnthropic(api_key="of the session", base_url="http://127.0.0.1")


async def solve(session):
    """Return 1 for an answer that is right at once, and half of that after a hint."""
    api = CLIENT.with_options(base_url=session.anthropic_base_url, api_key=session.api_key)
    messages = list(session.messages)
    for reward in (1.0, 0.5):
        answer = await api.messages.create(model=session.model, max_tokens=16, messages=messages)
        if answer.content[0].text == session.reference:
            return {"right": reward}
        hint = {"role": "user", "content": f"Wrong. {session.messages[-1]['content']}"}
        messages += [{"role": "assistant", "content": answer.content}, hint]
    return {"right": 0.0}
