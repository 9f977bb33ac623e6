"""Megatron-Core under a Hugging Face model: names of its parameters, process groups, the model, the optimizer's state.

Only `names.py` can be imported without Megatron-Core; `learners/backends/megatron.py` imports the rest when it is opened.
"""
