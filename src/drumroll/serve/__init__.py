"""An OpenAI-compatible endpoint in front of the engines: it serves, records and trains agents written for that protocol.

A *caller* makes calls on behalf of one sample. The endpoint records the tokens that the engine read and wrote in these
calls exactly, whatever the agent does with the texts.
"""
