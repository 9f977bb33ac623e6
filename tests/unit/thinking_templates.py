"""Chat templates of models that think, written after the habits of published ones."""

TOOLS = "{% if tools %}<tools>{{ tools | tojson }}<eos>{% endif %}"
START = "{% if add_generation_prompt %}<assistant>{% endif %}"
KEEPS = TOOLS + "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}" + START
DROPS = KEEPS.replace("m.content", "m.content.split('</think>')[-1] if m.role == 'assistant' else m.content")
"""Earlier thoughts are gone, wherever they are."""
OPENS = DROPS.replace(START, START.replace("<assistant>", "<assistant>{{ '<think>\\n' }}"))
"""Besides, the thought is opened for the model, which earlier turns do not show."""
SINCE = (
    TOOLS + "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% if loop.index0 > last.user %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ m.content }}{% endif %}<eos>{% endfor %}"
    + START
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
"""Thoughts since the last user's message are kept, in one form; `enable_thinking: false` opens and closes an empty one."""
TEMPLATES = {"keeps": KEEPS, "drops": DROPS, "opens": OPENS, "since": SINCE}
