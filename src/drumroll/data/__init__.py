"""Where prompts come from: rows, their rendering to tokens, and the order in which they are drawn."""
