"""An OpenAI-compatible endpoint before the engines: agents written for that protocol are served, recorded and trained.

A *caller* is whoever makes calls on behalf of one sample. What the engine saw and wrote in its calls is kept token by
token, whatever the agent does with the texts.
"""
